"""What is found out about one family of transformers' causal language models, each check in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers.family_steps import config_for, differences, own_logits, tokens_for
from helpers.transformers_families import config_of, is_size, kinds, layer_keys, model_of

import hal
from hal.checkpoint.model_registry import serves

BOUND = 1e-3
"""The largest difference of logits in float32, in parts of the largest, that is rounding."""
NARROW_BOUND = 8e-2
"""The same in bfloat16."""
SECONDS = 150
"""The longest time of one compiler."""
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Sizes that the NPU's attention takes."""
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 128,
    "v_head_dim": 64,
    "head_dim": 64,
    "index_head_dim": 128,
}
"""The same for latents, keys of two parts, and the keys of an index."""
Tell = Callable[..., None]


@contextmanager
def checkpoint(kind: str, **more: Any) -> Iterator[tuple[str, Any, list[list[int]]]]:
    """Yield the folder of a family's small checkpoint, the model, and the tokens of the steps."""
    model = model_of(kind, **more)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield folder, model, tokens_for(model.config.get_text_config().vocab_size)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def on_cpu(kind: str, compilers: tuple[str, ...], tell: Tell) -> None:
    """Compare logits in each compiler with transformers'."""
    name = kinds()[kind]
    tell(architecture=name, native=serves(name, {"model_type": kind}))
    try:
        model_of(kind)
    except Exception as error:
        tell(eager="no", **{"eager reason": f"no small random model: {_reason(error)}"})
        return
    with checkpoint(kind) as (folder, model, rows):
        for compiler in compilers:
            try:
                # What is compared here need not be compared at load, where refusals are of interest.
                config = config_for(compiler, check_model=compiler == "eager")
                with limited(SECONDS), hal.open(config) as backend:
                    made = hal.load_model(folder, backend)
                    wanted = own_logits(model, rows)
                    with hal.Runner(made, backend) as runner:
                        worst = max(differences(runner, rows, wanted).values())
                tell(**{compiler: "yes" if worst < BOUND else "wrong", f"{compiler} difference": worst})
            except Exception as error:
                tell(**{compiler: "no", f"{compiler} reason": _reason(error)})
                if compiler == "eager":
                    return


def on_two_ranks(kind: str, tell: Tell) -> None:
    """Compare logits of two ranks with transformers'."""
    torch.set_num_threads(1)  # The other rank is a fork, which threads do not survive.
    with checkpoint(kind) as (folder, model, rows):
        wanted = own_logits(model, rows)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        other = os.fork()
        rank = "1" if other == 0 else "0"
        os.environ |= {**ranks, "RANK": rank, "LOCAL_RANK": rank}
        found: dict[str, Any] = {}
        config = config_for("graph", check_model=False, parallel={"tensor": 2, "timeout": 60})
        try:
            with limited(SECONDS), hal.open(config) as backend:
                made = hal.load_model(folder, backend)
                with hal.Runner(made, backend) as runner:
                    worst = max(differences(runner, rows, wanted).values())
            found = {"ranks": "yes" if worst < BOUND else "wrong", "ranks difference": worst}
        except Exception as error:
            found = {"ranks": "no", "ranks reason": _reason(error)}
        if other == 0:
            os._exit(0)
        tell(**found)
        os.waitpid(other, 0)


def on_npu(kind: str, tell: Tell) -> None:
    """Compare logits of the emulated NPU in bfloat16, and count the launches of a decode layer."""
    hal.open({"backend": "npu", "options": {"emulator": "on"}}).close()  # before transformers imports torch_npu
    counts = []
    for layers in (1, 2):
        with checkpoint(kind, **_layers(kind, layers)) as (folder, model, rows):
            # In 16 bits, so that a router chooses the same experts; and exactly, from the same weights, since a small
            # model may round far: either is right.
            wanted = [own_logits(model.bfloat16(), rows), own_logits(model.float(), rows)]
            with limited(2 * SECONDS), hal.open(_on_npu()) as backend:
                made = hal.load_model(folder, backend)
                with hal.Runner(made, backend) as runner:
                    counts.append(_launches(runner, backend))
                    if layers == 2:
                        worst = _short(runner, rows, wanted)
                        tell(npu="yes" if worst < NARROW_BOUND else "wrong", **{"npu difference": worst})
    tell(launches=counts[1] - counts[0])


def beside_on_npu(kind: str, tell: Tell) -> None:
    """Count the launches of a decode layer of hal's own model, and of transformers' without hal, in bfloat16."""
    hal.open({"backend": "npu", "options": {"emulator": "on"}}).close()
    own, eager = [], []
    for layers in (1, 2):
        with checkpoint(kind, **_layers(kind, layers)) as (folder, model, _):
            with limited(2 * SECONDS), hal.open({**_on_npu(), "model_source": "hal"}) as backend:
                made = hal.load_model(folder, backend)
                with hal.Runner(made, backend) as runner:
                    own.append(_launches(runner, backend))
            eager.append(_eager_launches(model))
    tell(own=own[1] - own[0], transformers=eager[1] - eager[0])


def _on_npu() -> dict[str, Any]:
    return {
        **config_for("graph"),
        "backend": "npu",
        "dtype": "bfloat16",
        "options": {"emulator": "on"},
        "cache": {"num_tokens": 2048},
        "check_model": False,
    }


def _eager_launches(model: Any) -> int:
    """Return the launches of a decode step of a model of transformers."""
    import emulated_cann

    model, prompt = model.bfloat16().to("npu"), torch.tensor([[5, 6, 7]], device="npu")
    with torch.inference_mode():
        for _ in range(2):
            cache = model(prompt, use_cache=True).cache
            torch.accelerator.synchronize()
            with emulated_cann.trace() as trace:
                model(prompt[:, :1], cache=cache, use_cache=True)
                torch.accelerator.synchronize()
    return sum(trace.counts().values())


def _layers(kind: str, layers: int) -> dict[str, Any]:
    """Return the keys of a config with so many layers, and of wide heads if the family has keys for their sizes."""
    small = config_of(kind).get_text_config()
    if hasattr(small, "kv_lora_rank"):
        wide = {name: size for name, size in LATENT.items() if is_size(small, name)}
    else:
        fits = all(is_size(small, name) for name in WIDE) and small.num_key_value_heads == 2
        wide = WIDE if fits else {}
    return {**wide, **layer_keys(kind, layers)}


def _launches(runner: hal.Runner, backend: hal.Backend) -> int:
    runner.step(runner.batch([[5, 6, 7]], [[1]]))
    batch = runner.batch([[8]], [[1]], cached=[3])
    runner.step(batch)
    with backend.counting_launches() as counted:
        runner.step(batch)
        backend.device.synchronize()
    return sum(counted.values())


def _short(runner: hal.Runner, rows: list[list[int]], wanted: list[list[torch.Tensor]]) -> float:
    """Return the largest difference of prompts from the nearer of several logits."""
    got = runner.step(runner.batch([row[:9] for row in rows], [[1], [2], [3]])).logits.float().cpu()
    return max(
        min(float((one - own[8]).abs().max() / own[8].abs().max()) for own in each)
        for one, *each in zip(got, *wanted, strict=True)
    )


def _reason(error: BaseException) -> str:
    text = error.problem if isinstance(error, hal.HalError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0][:300]
