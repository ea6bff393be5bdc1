"""``hal generate``: continue prompts with a checkpoint. Texts go to stdout, everything else to stderr."""

from __future__ import annotations

import functools
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import click

from hal.cli.config_options import Settings, configured, parallel, start_ranks
from hal.cli.console import progress_bar
from hal.cli.generation_options import (
    PROMPT,
    PROMPTS_FILE,
    REVISION,
    SWITCH,
    TOOLS,
    Prompts,
    draft_options,
    params_of,
    sampling_options,
    switches_of,
    tools_of,
)
from hal.cli.stdout import ResultCommand, echo
from hal.generation.sampling_params import WITHOUT_EFFECT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hal.generation.drafting.drafter import DraftConfig
    from hal.generation.generate import Piece
    from hal.generation.llm.engine import Engine
    from hal.generation.llm.prompts import MultimodalPrompt
    from hal.generation.sampling_params import SamplingParams

SEED = "Prompt i uses SEED + i. By default, or with -1, a random seed, which is printed."
CHAT = "Each prompt is a message of a user, in the checkpoint's chat template."
IMAGE = "An image that precedes each prompt, with --chat, which it implies. Repeatable."
VIDEO = "A video that precedes each prompt, after the images, with --chat, which it implies. Repeatable."
ADAPTER = "An adapter (LoRA) for all prompts: the folder that peft saved."
LOGPROBS = "With --json, add the log-probability of each new token, and the N most likely tokens with theirs."
STREAM = "With --json, print an object for each piece of text. Other texts are always written as they are generated."

DATA_PARALLEL = "Run N copies of the model, which share the prompts. The texts are printed when all are finished."

JSON = "Print one JSON object per prompt, a line each, instead of the texts."

log = logging.getLogger("hal.cli")


def _files(medium: str, told: str) -> Callable[[Any], Any]:
    """Return the option of files of a medium."""
    kind = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option(f"--{medium}", f"{medium}s", type=kind, multiple=True, metavar="FILE", help=told)


class _Generate(ResultCommand):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. A second one is most likely a prompt."""
        found = super().parse_args(ctx, args)
        if ctx.args:
            raise click.UsageError(f"Got unexpected extra argument ({ctx.args[0]}). A prompt needs --prompt.", ctx)
        return found


@click.command("generate", cls=_Generate, context_settings={"allow_extra_args": True})
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help=PROMPT)
@click.option("--prompts-file", type=click.File("rb"), metavar="FILE", help=PROMPTS_FILE)
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Maximum per prompt.")
@sampling_options(SEED)
@click.option("--chat", is_flag=True, help=CHAT)
@_files("image", IMAGE)
@_files("video", VIDEO)
@click.option("--switch", "switches", multiple=True, metavar="NAME=VALUE", help=f"With --chat: {SWITCH}")
@click.option("--tools", type=click.Path(path_type=Path), metavar="FILE", help=f"With --chat: {TOOLS}")
@click.option("--revision", metavar="REVISION", help=REVISION)
@click.option("--adapter", type=click.Path(path_type=Path), metavar="PATH", help=ADAPTER)
@draft_options
@configured(ranks=parallel(DATA_PARALLEL))
@click.option("--json", "as_json", is_flag=True, help=JSON)
@click.option("--logprobs", type=int, metavar="N", help=LOGPROBS)
@click.option("--stream", is_flag=True, help=STREAM)
def command(
    checkpoint: Path,
    prompts: Sequence[str],
    prompts_file: BinaryIO | None,
    max_new_tokens: int,
    sampling: dict[str, Any],
    chat: bool,
    images: Sequence[Path],
    videos: Sequence[Path],
    switches: Sequence[str],
    tools: Path | None,
    revision: str | None,
    adapter: Path | None,
    draft: DraftConfig | None,
    settings: Settings,
    as_json: bool,
    logprobs: int | None,
    stream: bool,
) -> None:
    """Continue prompts with the model CHECKPOINT, a folder or a name of the Hugging Face Hub.

    Prompts run together and do not affect each other. Their texts go to stdout in order, each followed by a newline,
    and if there are several, preceded by a line with the prompt. Everything else goes to stderr.

    With --json, each prompt is an object with the keys index, prompt, text, token_ids and finished: the number of the
    prompt, the prompt, its continuation, the new tokens, and "stop" for a stop token or text, which the text leaves
    out, or "length". With --logprobs, the key logprobs has an object for each new token, with the keys logprob and top,
    a list of token ids and their log-probabilities. With --stream, text and token_ids are those of a piece, and
    finished is null before the last. With --draft, a last object has the key drafts: the numbers of drafted and of
    accepted tokens, each a list by place, the next token first.

    Sampling follows the checkpoint's generation_config.json, if it has one; options override it.

    HAL_* environment variables set the configuration; an option overrides a single key.
    """
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.checkpoint.hub import check_path
    from hal.checkpoint.random_weights import meta_model
    from hal.config.bounds import SEQUENCES
    from hal.generation.llm.engine import open_engine
    from hal.generation.llm.processor import Conversations
    from hal.generation.llm.prompts import MultimodalPrompt
    from hal.parallel.launch import agreed, rank, yielding_to_the_cause

    kinds = {"image": images, "video": videos}
    media = [{"type": kind, kind: str(file)} for kind, files in kinds.items() for file in files]
    chat = chat or bool(media)
    if not chat and (switches or tools is not None):
        raise click.UsageError("--switch and --tools are for chat templates: add --chat.")
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json.")
    check_path(checkpoint)  # before the prompts, whose lack would hide a mistyped path
    given = Prompts.read(prompts, prompts_file)
    variables, functions = switches_of(switches), tools_of(tools)
    config = settings.config()
    opened = Checkpoint.open(checkpoint, revision=revision)
    params = params_of(opened, {"max_new_tokens": max_new_tokens, "logprobs": logprobs, **sampling})
    tokenizer = opened.tokenizer()
    model = functools.cache(lambda: meta_model(opened.config, config.model_source))
    conversations = Conversations(opened, lambda: tokenizer, model)

    def encode(text: str) -> MultimodalPrompt:
        if not chat:
            return MultimodalPrompt(tokenizer.encode(text).ids)
        content = [*media, {"type": "text", "text": text}] if media else text
        found = conversations.prompt([{"role": "user", "content": content}], functions, variables)
        return found if isinstance(found, MultimodalPrompt) else MultimodalPrompt(found)

    encoded = given.encode(encode)
    if start_ranks(config.parallel, opened, given.stdin, config.model_source):
        return

    with yielding_to_the_cause(), settings.emulated() as settings, ExitStack() as stack:
        merged = settings.merged()
        merged["cache"] = {"reuse_prefixes": False, **merged.get("cache", {})}  # Texts do not depend on each other.
        with progress_bar("loading", shown=rank() == 0) as progress:
            engine = open_engine(
                opened,
                merged,
                stack,
                max_length=None,
                max_sequences=min(len(encoded), SEQUENCES),
                progress=progress,
                lengths=[len(each) + params.max_new_tokens for each in encoded],
                draft=draft,
                adapters={} if adapter is None else {str(adapter): adapter},
            )
        runner = engine.runner
        if "seed" not in sampling:
            params = attrs.evolve(params, seed=agreed(secrets.randbelow(2**32), runner.backend.mesh))
        if runner.backend.mesh.first:
            _print_notes(params, sampling)
        _print_texts(engine, given.texts, encoded, params, tokenizer, as_json, stream)


def _print_texts(
    engine: Engine,
    texts: list[str],
    encoded: Sequence[MultimodalPrompt],
    params: SamplingParams,
    tokenizer: Tokenizer,
    as_json: bool,
    stream: bool,
) -> None:
    """Generate, and print the texts if this is the rank that prints. Prompt ``i`` uses the seed plus ``i``."""
    from hal.generation.generate import generate, texts_in_order

    each_params = [attrs.evolve(params, seed=(params.seed + index) % (1 << 63)) for index in range(len(texts))]
    start, count, shown = time.perf_counter(), 0, -1
    held: list[Piece] = []  # of the prompt whose JSON is not complete
    tokens, items = [each.token_ids for each in encoded], [each.items for each in encoded]
    runner, speculation = engine.runner, engine.speculation
    loaded = [] if runner.model.adapters is None else runner.model.adapters.names
    adapters = loaded * len(tokens) if loaded else None
    made = generate(runner, tokens, each_params, tokenizer, items=items, adapters=adapters, speculation=speculation)
    for piece in texts_in_order(made, tokens, tokenizer, each_params):
        if not runner.backend.mesh.first:
            continue
        count += 1
        if as_json:
            held.append(piece)
            if piece.finished or stream:
                echo(_as_json(texts[piece.prompt_index], held))
                held.clear()
            continue
        if piece.prompt_index != shown and len(texts) > 1:
            echo(f"--- prompt {piece.prompt_index}: {texts[piece.prompt_index]!r:.70}".encode())
        shown = piece.prompt_index
        # Bytes, because the model's text is UTF-8 in any locale.
        echo((piece.text + ("\n" if piece.finished else "")).encode(), nl=False)
    took = time.perf_counter() - start
    if runner.backend.mesh.first:
        click.echo(f"{count} tokens in {took:.2f} s: {count / took:.1f} tokens/s", err=True)
        if speculation is not None:
            found = speculation.acceptance
            click.echo(str(found), err=True)
            if as_json:
                echo(json.dumps({"drafts": {"drafted": found.drafted, "accepted": found.accepted}}))


def _as_json(prompt: str, pieces: Sequence[Piece]) -> str:
    """Return the line of ``--json`` for a finished prompt, in ASCII, so that it is valid in any locale."""
    return json.dumps(
        {
            "index": pieces[-1].prompt_index,
            "prompt": prompt,
            "text": "".join(piece.text for piece in pieces),
            "token_ids": [piece.token_id for piece in pieces],
            "finished": pieces[-1].finished,
            **({} if pieces[-1].logprob is None else {"logprobs": [_likely(piece) for piece in pieces]}),
        }
    )


def _likely(piece: Piece) -> dict[str, Any]:
    return {"logprob": piece.logprob, "top": piece.top_logprobs}


def _print_notes(params: SamplingParams, sampling: Mapping[str, Any]) -> None:
    """Warn of options without effect, and print a random seed for reproduction."""
    if params.temperature == 0 and (given := [name for name in WITHOUT_EFFECT if name in sampling]):
        unused = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        log.warning("%s: no effect, because temperature 0 selects the most likely token", unused)
    elif params.temperature > 0 and "seed" not in sampling:
        click.echo(f"seed {params.seed}", err=True)
