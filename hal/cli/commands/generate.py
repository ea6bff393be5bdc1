"""``hal generate``: continue prompts with a checkpoint. Texts go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import click
from click.core import ParameterSource

from hal.cli import ranks
from hal.cli.config_options import COMPILATION_CONFIG, COMPILER, settings_of
from hal.cli.emulation import EMULATE, emulated
from hal.cli.prompts import PROMPT, PROMPTS_FILE, Prompts
from hal.cli.stdout import ResultCommand, echo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hal.checkpoint.loading import Progress
    from hal.execution.runner import Runner
    from hal.generation.sampling_params import SamplingParams
    from hal.generation.streaming_text import Piece
    from hal.nn import CausalLM

MAX_CACHE_TOKENS = 65536
"""Maximum size of the cache by default; prompts that do not fit wait."""
SAMPLING = {
    "temperature": "0 selects the most likely token.",
    "top_k": "Keep only the TOP_K most likely tokens; 0 keeps all.",
    "top_p": "Keep the most likely tokens whose probabilities sum to this value.",
    "min_p": "Keep tokens with at least this fraction of the highest probability.",
    "seed": "Prompt i uses SEED + i. By default, a random seed, which is printed.",
}
PENALTIES = {
    "repetition_penalty": "Divide positive logits of the prompt's and the new tokens, multiply others; 1 for none.",
    "frequency_penalty": "Subtracted from a token's logit for each time that it was generated; -2 to 2.",
    "presence_penalty": "Subtracted from the logit of a token that was generated; -2 to 2.",
}

DATA_PARALLEL = "Run N copies of the model, which share the prompts. The texts are printed when all are finished."

JSON = "Print one JSON object per prompt, a line each, instead of the texts."

log = logging.getLogger("hal.cli")


@click.command("generate", cls=ResultCommand)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help=PROMPT)
@click.option("--prompts-file", type=click.File("rb"), metavar="FILE", help=PROMPTS_FILE)
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Maximum per prompt.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help=SAMPLING["temperature"])
@click.option("--top-k", type=int, default=0, show_default=True, help=SAMPLING["top_k"])
@click.option("--top-p", type=float, default=1.0, show_default=True, help=SAMPLING["top_p"])
@click.option("--min-p", type=float, default=0.0, show_default=True, help=SAMPLING["min_p"])
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help=PENALTIES["repetition_penalty"])
@click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help=PENALTIES["frequency_penalty"])
@click.option("--presence-penalty", type=float, default=0.0, show_default=True, help=PENALTIES["presence_penalty"])
@click.option("--seed", type=int, help=SAMPLING["seed"])
@click.option("--dtype", metavar="NAME", help="auto (the checkpoint's), float32, bfloat16 or float16.")
@click.option("--backend", metavar="NAME", help="A driver, or auto; see `hal backends`.")
@click.option("--emulate", is_flag=True, help=EMULATE)
@click.option("--compiler", metavar="NAME", help=COMPILER)
@click.option("--compilation-config", metavar="JSON", help=COMPILATION_CONFIG)
@ranks.parallel(DATA_PARALLEL)
@click.option("--json", "as_json", is_flag=True, help=JSON)
def command(
    checkpoint: Path,
    prompts: Sequence[str],
    prompts_file: BinaryIO | None,
    seed: int | None,
    dtype: str | None,
    backend: str | None,
    emulate: bool,
    compiler: str | None,
    compilation_config: str | None,
    tensor_parallel: int | None,
    data_parallel: int | None,
    experts: str | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Continue prompts with the model CHECKPOINT, a folder or a name of the Hugging Face Hub.

    Prompts run together and do not affect each other. Their texts go to stdout in order, each followed by a newline,
    and if there are several, preceded by a line with the prompt. Everything else goes to stderr.

    With --json, each prompt is an object with the keys index, prompt, text, token_ids and finished: the number of the
    prompt, the prompt, its continuation, the new tokens, and "stop" for a stop token, which the text leaves out, or
    "length".

    HAL_* environment variables set the configuration; an option overrides a single key.
    """
    import hal
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.config import bounds, read
    from hal.parallel.launch import agreed, yielding_to_the_cause

    given = Prompts.read(prompts, prompts_file)
    settings = ranks.with_ranks(
        settings_of(backend, dtype, compiler, compilation_config), tensor_parallel, data_parallel, experts
    )
    read(hal.Config, settings, "configuration")
    opened = Checkpoint.open(checkpoint)
    params = hal.SamplingParams(**sampling, seed=seed or 0, stop_token_ids=opened.stop_token_ids)
    tokenizer = opened.tokenizer()
    tokens = given.encode(tokenizer)
    if ranks.start_ranks(read(hal.Config, settings, "configuration").parallel, opened, given.stdin):
        return

    with yielding_to_the_cause():
        with emulated(emulate, backend) as options:
            settings["options"] = {**settings.get("options", {}), **options}
            config = read(hal.Config, settings, "configuration")
            on = hal.open(config)
        params = attrs.evolve(params, seed=agreed(secrets.randbelow(2**32) if seed is None else seed, on.mesh))
        with _progress_bar("loading", shown=on.mesh.first) as progress:
            model = hal.load_model(opened, on, progress=progress)
        if "num_tokens" not in settings.get("cache", {}):
            num_tokens = _cache_tokens([len(each) for each in tokens], params.max_new_tokens, model, on.block_size)
            on.configure(attrs.evolve(config, cache=attrs.evolve(config.cache, num_tokens=num_tokens)))
        if on.mesh.first:
            _print_notes(params, seed)
        with on, hal.Runner(model, on, max_sequences=min(len(tokens), bounds.SEQUENCES)) as runner:
            _print_texts(runner, given.texts, tokens, params, tokenizer, as_json)


def _print_texts(
    runner: Runner,
    texts: list[str],
    tokens: list[list[int]],
    params: SamplingParams,
    tokenizer: Tokenizer,
    as_json: bool,
) -> None:
    """Generate, and print the texts if this is the rank that prints. Prompt ``i`` uses the seed plus ``i``."""
    from hal.generation.generate import generate
    from hal.generation.streaming_text import texts_in_order

    each_params = [attrs.evolve(params, seed=params.seed + index) for index in range(len(texts))]
    start, count, shown = time.perf_counter(), 0, -1
    held: list[Piece] = []  # of the prompt whose JSON is not complete
    for piece in texts_in_order(generate(runner, tokens, each_params, tokenizer), tokens, tokenizer, each_params):
        if not runner.backend.mesh.first:
            continue
        count += 1
        if as_json:
            held.append(piece)
            if piece.finished:
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


def _as_json(prompt: str, pieces: Sequence[Piece]) -> str:
    """Return the line of ``--json`` for a finished prompt, in ASCII, so that it is valid in any locale."""
    return json.dumps(
        {
            "index": pieces[-1].prompt_index,
            "prompt": prompt,
            "text": "".join(piece.text for piece in pieces),
            "token_ids": [piece.token_id for piece in pieces],
            "finished": pieces[-1].finished,
        }
    )


def _cache_tokens(lengths: list[int], max_new_tokens: int, model: CausalLM, block_size: int) -> int:
    """Return a cache size in tokens that holds all prompts, or at least each one, in whole blocks."""
    most = [min(length + max_new_tokens, model.max_length) for length in lengths]
    whole = [math.ceil(each / block_size) * block_size for each in most]
    return max(max(whole), min(sum(whole), MAX_CACHE_TOKENS))


def _print_notes(params: SamplingParams, seed: int | None) -> None:
    """Warn of options without effect, and print a random seed for reproduction."""
    source = click.get_current_context().get_parameter_source
    given = [name for name in SAMPLING if name != "temperature" and source(name) is not ParameterSource.DEFAULT]
    if params.temperature == 0 and given:
        unused = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        log.warning("%s: no effect, because temperature 0 selects the most likely token", unused)
    elif params.temperature > 0 and seed is None:
        click.echo(f"seed {params.seed}", err=True)


@contextmanager
def _progress_bar(title: str, *, shown: bool = True) -> Iterator[Progress]:
    """Show a progress bar of bytes on stderr, if ``shown`` and it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = TextColumn(title), BarColumn(), DownloadColumn()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
