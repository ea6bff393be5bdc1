"""``hal chat``: a conversation in the terminal. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from hal.cli.config_options import Settings, configured, start_ranks, tensor_parallel
from hal.cli.generation_options import REVISION, SWITCH, draft_options, sampling_options, switches_of
from hal.cli.stdout import ResultCommand, echo
from hal.errors import BatchError, ConfigError, ModelError

if TYPE_CHECKING:
    from hal.generation.drafting.drafter import DraftConfig
    from hal.generation.llm.language_model import LLM

PROMPT = "> "
HELP = """\
/image FILE   show an image with the next message
/system TEXT  begin a new conversation, with instructions to the model
/reset        begin a new conversation
/exit         end; so does Ctrl-D. Ctrl-C stops an answer
"""
SEED = "The seed of the first answer. By default, or with -1, a random one."


@click.command("chat", cls=ResultCommand)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--system", metavar="TEXT", help="Instructions to the model.")
@click.option("--max-new-tokens", type=int, help="Maximum of an answer. By default, what the context holds.")
@sampling_options(SEED)
@click.option("--switch", "switches", multiple=True, metavar="NAME=VALUE", help=SWITCH)
@click.option("--revision", metavar="REVISION", help=REVISION)
@draft_options
@configured(ranks=tensor_parallel())
def command(
    checkpoint: Path,
    system: str | None,
    max_new_tokens: int | None,
    sampling: dict[str, Any],
    switches: Sequence[str],
    revision: str | None,
    draft: DraftConfig | None,
    settings: Settings,
) -> None:
    """Talk with the model CHECKPOINT, a folder or a name of the Hugging Face Hub.

    Each line is a message. /reset begins a new conversation, /system TEXT does so with instructions to the model, and
    /exit or Ctrl-D ends. Ctrl-C stops an answer.

    The checkpoint needs a chat template. Sampling follows its generation_config.json; options override it.
    """
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.generation.llm.chat_template import ChatTemplate

    variables = switches_of(switches)
    config = settings.config()
    opened = Checkpoint.open(checkpoint, revision=revision)
    ChatTemplate.read(opened)  # Before the weights: it may be missing.
    opened.tokenizer()
    if start_ranks(config.parallel, opened, source=config.model_source, leads=True):
        return
    with settings.llm(opened, max_sequences=1, draft=draft) as llm:
        if llm.first:
            Conversation(llm, sampling, max_new_tokens, system, variables).run()


@attrs.define
class Conversation:
    """A conversation of a person, at the terminal, with a model.

    Attributes:
        sampling: the sampling parameters by name.
        max_new_tokens: the most tokens of an answer; None for what the context holds.
        switches: variables of the chat template.
        images: the files of the images to show with the next message.
    """

    llm: LLM
    sampling: dict[str, Any]
    max_new_tokens: int | None
    system: str | None
    switches: dict[str, Any] = attrs.field(factory=dict)
    messages: list[dict[str, Any]] = attrs.field(factory=list)
    images: list[str] = attrs.field(factory=list)
    _interrupted: bool = False

    def run(self) -> None:
        """Read lines from stdin and answer them, until there are no more."""
        self.reset(self.system)
        if sys.stdin.isatty():
            click.echo(HELP, err=True, nl=False)
        with self._catching_interrupts():
            while (line := self._read()) is not None:
                word, _, rest = line.partition(" ")
                if word == "/exit":
                    return
                if word == "/reset":
                    self.reset(self.system)
                elif word == "/system":
                    self.reset(rest.strip() or None)
                elif word == "/image" and (file := rest.strip()):
                    if Path(file).is_file():
                        self.images.append(file)
                    else:
                        click.echo(f"there is no file {file}", err=True)
                elif word.startswith("/"):
                    if word not in ("/help", "/image"):
                        click.echo(f"there is no command {word}", err=True)
                    click.echo(HELP, err=True, nl=False)
                elif line:
                    self.answer(line)

    def reset(self, system: str | None) -> None:
        """Begin a new conversation."""
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.images.clear()

    def answer(self, text: str) -> None:
        """Answer a message, and write the answer as it is generated."""
        shown = [{"type": "image", "image": each} for each in self.images]
        self.images.clear()
        self.messages.append({"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text})
        try:
            prompt = self.llm.chat_prompt(self.messages, **self.switches)
            room = self.llm.max_length - len(prompt)
            if room < 1:
                raise BatchError(
                    f"the conversation has {len(prompt)} tokens, and the model takes {self.llm.max_length}",
                    "begin a new one with /reset",
                )
            most = room if self.max_new_tokens is None else min(room, self.max_new_tokens)
            made, count, start = "", 0, time.perf_counter()
            self._interrupted = False
            pieces = self.llm.pieces(prompt, max_new_tokens=most, **self.sampling)
            for piece in pieces:
                echo(piece.text.encode(), nl=False)
                made, count = made + piece.text, count + 1
                if self._interrupted:
                    pieces.close()  # type: ignore[attr-defined]
                    break
        except (BatchError, ConfigError, ModelError) as error:
            self.messages.pop()
            click.echo(str(error), err=True)
            return
        took = time.perf_counter() - start
        echo()
        ending = ", stopped" if self._interrupted else ""
        click.echo(f"[{count} tokens in {took:.2f} s: {count / took:.1f} tokens/s{ending}]", err=True)
        self.messages.append({"role": "assistant", "content": made})

    def _read(self) -> str | None:
        """Return the next line; None at the end of stdin."""
        if sys.stdin.isatty():
            click.echo(PROMPT, err=True, nl=False)
        line = sys.stdin.readline()
        return line.strip() if line else None

    @contextmanager
    def _catching_interrupts(self) -> Iterator[None]:
        """Let an interrupt stop the answer, and not the program."""

        def handle(number: int, frame: object) -> None:
            self._interrupted = True

        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job
            yield
            return
        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
