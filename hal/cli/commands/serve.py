"""``hal serve``: an OpenAI-compatible HTTP server for a model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hal.cli.config_options import Settings, configured, start_ranks, tensor_parallel
from hal.cli.generation_options import REVISION, SWITCH, draft_options, switches_of
from hal.cli.stdout import ResultCommand
from hal.config.bounds import SECONDS, SEQUENCES, TOKENS

if TYPE_CHECKING:
    from hal.generation.drafting.drafter import DraftConfig

HOST = "The address to listen at. 0.0.0.0 is every address of this machine."
PORT = "The port; 0 for a free one, which is printed."
API_KEY = "The key that requests below /v1 need. The variable keeps it out of the list of processes."
NAME = "The model's name in requests. By default, CHECKPOINT as it is given."
WAITING = "The most texts that wait while others run. Requests beyond are answered with status 429."
BODY = "The most MiB of a request. Larger ones are answered with status 413."
TOGETHER = "The most texts that are generated together."
LENGTH = "The most tokens of a prompt and its text. By default, what the model takes and the cache holds."
ADAPTER = "An adapter (LoRA) that peft saved, and its name, which requests give as their model. Repeatable."
RECORD = "What requests may ask of the model's choices: experts, positions. Repeatable."
REPLAY = "What of them requests may give for texts that are scored. Repeatable."
SHUTDOWN = "How long requests may go on after SIGTERM or Ctrl-C."
LOCAL = ("127.0.0.1", "localhost", "::1")

log = logging.getLogger("hal.cli")


@click.command("serve", cls=ResultCommand)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help=HOST)
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", default=8000, show_default=True, help=PORT)
@click.option("--api-key", metavar="KEY", envvar="HAL_API_KEY", show_envvar=True, help=API_KEY)
@click.option("--served-name", metavar="NAME", help=NAME)
@click.option(
    "--max-sequences", type=click.IntRange(1, SEQUENCES), metavar="N", default=64, show_default=True, help=TOGETHER
)
@click.option(
    "--max-waiting", type=click.IntRange(0, SEQUENCES), metavar="N", default=256, show_default=True, help=WAITING
)
@click.option("--max-length", type=click.IntRange(2, TOKENS), metavar="N", help=LENGTH)
@click.option("--max-body", type=click.IntRange(1, 1024), metavar="MIB", default=16, show_default=True, help=BODY)
@click.option(
    "--shutdown-timeout", type=click.IntRange(0, SECONDS), metavar="S", default=30, show_default=True, help=SHUTDOWN
)
@click.option("--switch", "switches", multiple=True, metavar="NAME=VALUE", help=SWITCH)
@click.option("--revision", metavar="REVISION", help=REVISION)
@click.option("--adapter", "adapters", multiple=True, metavar="NAME=PATH", help=ADAPTER)
@click.option("--record", multiple=True, metavar="NAME", help=RECORD)
@click.option("--replay", multiple=True, metavar="NAME", help=REPLAY)
@draft_options
@configured(ranks=tensor_parallel())
def command(
    checkpoint: Path,
    host: str,
    port: int,
    api_key: str | None,
    served_name: str | None,
    max_sequences: int,
    max_waiting: int,
    max_length: int | None,
    max_body: int,
    shutdown_timeout: int,
    switches: tuple[str, ...],
    revision: str | None,
    adapters: tuple[str, ...],
    record: tuple[str, ...],
    replay: tuple[str, ...],
    draft: DraftConfig | None,
    settings: Settings,
) -> None:
    """Serve the model CHECKPOINT, a folder or a name of the Hugging Face Hub, to clients of OpenAI's API.

    The paths are /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/models, /health and /metrics. The address
    is printed to stderr when the server answers.

    SIGTERM and Ctrl-C end the server: it refuses new requests, and lets running ones end.

    HAL_* environment variables set the configuration; an option overrides a single key.
    """
    from hal.config.optional_libraries import need

    for module in ("starlette", "uvicorn", "prometheus_client"):
        need(module, "serve", "hal serve")
    from hal.checkpoint.checkpoint import Checkpoint
    from hal.parallel.launch import rank
    from hal.serve.application import application, bound_socket, run
    from hal.serve.server_state import ServerOptions

    found, name = switches_of(switches), served_name or str(checkpoint)
    folders = _folders(adapters, name)
    config = settings.config()
    opened = Checkpoint.open(checkpoint, revision=revision)
    opened.tokenizer()
    if start_ranks(config.parallel, opened, source=config.model_source, leads=True):
        return
    listener = bound_socket(host, port) if rank() == 0 else None  # Before the weights: it may be taken.
    limits = {"max_sequences": max_sequences, "max_length": max_length}
    kept = {"record": record, "replay": replay}
    with settings.llm(opened, **limits, draft=draft, adapters=folders, **kept) as llm:
        if listener is None:
            return
        allowed = ServerOptions(
            name=name,
            max_texts=max_sequences + max_waiting,
            max_body=max_body << 20,
            api_key=api_key,
            switches=found,
        )
        if host not in LOCAL and api_key is None:
            log.warning("any machine that reaches %s can use the model: set --api-key, or --host 127.0.0.1", host)
        address, listening_port = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        run(
            application(llm, allowed),
            listener,
            shutdown_timeout,
            lambda: click.echo(f"{allowed.name} is served at http://{shown}:{listening_port}/v1", err=True),
            lambda: llm.ended,
        )


def _folders(adapters: tuple[str, ...], model: str) -> dict[str, Path]:
    """Return the folders of adapters by name."""
    found: dict[str, Path] = {}
    for each in adapters:
        name, _, folder = each.partition("=")
        if not name or not folder or name in found or name == model:
            raise click.UsageError(f"--adapter {each}: give NAME=PATH, each name once, and another than the model's.")
        found[name] = Path(folder)
    return found
