"""What ranks do in tests of several devices. Each function runs on every rank; see :mod:`helpers.ranks`."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import hal
from hal import ops
from hal.nn import Experts
from hal.ops.experts.routing import routing
from helpers import rank_faults

PROMPTS = ("def read_lines(path):", "class Stack:", "def main():")


class _UncapturedSteps(logging.Handler):
    """Collects the runner's warnings of steps that no compiled form accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "runs uncaptured" in record.getMessage():
            self.found.append(record.getMessage())


def tokens(
    checkpoint: str,
    dtype: str,
    compilers: list[str],
    parallel: dict[str, Any],
    on: dict[str, Any] | None = None,
    prompts: int = len(PROMPTS),
    count: bool = False,
    continuations: list[list[int]] | None = None,
    sampling: tuple[dict[str, Any], ...] = ({},),
) -> dict[str, Any]:
    """Generate with each compiler. Returns each prompt's tokens by compiler.

    Launches are under ``launches of`` the compiler, logits under ``logits of`` it.

    Steps that ``graph`` should replay must not run uncaptured, which would give the same tokens.

    Args:
        checkpoint: the folder.
        dtype: the dtype of computation.
        compilers: names of compilers.
        parallel: the configuration's table.
        on: the configuration's backend and options; None for the CPU.
        prompts: the number of prompts. The first gets the most new tokens.
        count: whether to count launches, on an NPU.
        continuations: tokens after each prompt. The logits that choose each of them are returned, too.
        sampling: sampling parameters, which the prompts take in turn.
    """
    found: dict[str, Any] = {}
    for compiler in compilers:
        uncaptured, log = _UncapturedSteps(), logging.getLogger("hal.execution")
        log.addHandler(uncaptured)
        config = {
            **(on or {"backend": "cpu"}),
            "dtype": dtype,
            "parallel": parallel,
            "compilation": {"compiler": compiler, "capture_sizes": [1, 2, 4]},
        }
        with hal.open(config) as backend:
            model = hal.load_model(checkpoint, backend)
            tokenizer = hal.Checkpoint.open(checkpoint).tokenizer()
            given = [tokenizer.encode(text).ids for text in PROMPTS[:prompts]]
            taken = [sampling[index % len(sampling)] for index in range(prompts)]
            params = [hal.SamplingParams(max_new_tokens=32 - 7 * row, **each) for row, each in enumerate(taken)]
            texts: list[list[int]] = [[] for _ in given]
            counting = backend.counting_launches() if count else nullcontext({})
            with hal.Runner(model, backend) as runner, counting as launches:
                for token in hal.generate(runner, given, params):
                    texts[token.prompt_index].append(token.token_id)
                if continuations is not None:
                    found[f"logits of {compiler}"] = _logits_along(runner, given, continuations)
            found[compiler], found[f"launches of {compiler}"] = texts, dict(launches)
        log.removeHandler(uncaptured)
        assert compiler != "graph" or not uncaptured.found, uncaptured.found
    return found


def _logits_along(runner: hal.Runner, prompts: list[list[int]], continuations: list[list[int]]) -> list[Tensor]:
    """Return the logits ``[tokens, vocab_size]`` that choose each token after a prompt, for each prompt."""
    found: list[list[Tensor]] = [[] for _ in prompts]
    texts = [[*prompt, *new] for prompt, new in zip(prompts, continuations, strict=True)]
    blocks = [runner.blocks.take(runner.spec.blocks_for(len(text))) or [] for text in texts]
    for step in range(max(map(len, continuations))):
        rows = [row for row, new in enumerate(continuations) if step < len(new)]
        stops = {row: len(prompts[row]) + step for row in rows}
        starts = {row: stops[row] - 1 if step else 0 for row in rows}
        batch = runner.batch(
            [texts[row][starts[row] : stops[row]] for row in rows],
            [blocks[row] for row in rows],
            cached=[starts[row] for row in rows],
        )
        for row, logits in zip(rows, runner.step(batch).logits.cpu(), strict=True):
            found[row].append(logits.clone())  # A replay's logits are valid until the next one.
    return [torch.stack(each) for each in found]


def several(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run :func:`tokens` with the arguments of each job, in processes that start once."""
    return [tokens(**job) for job in jobs]


def logits(
    checkpoint: str, dtype: str, parallel: dict[str, Any], cache: str = "model", weights: str = "auto"
) -> dict[str, Any]:
    """Run one prefill, and return its logits, and the bytes of weights, of experts, and of what was read of files."""
    read = 0

    def progress(done: int, total: int) -> None:
        nonlocal read
        read = done

    config = {"backend": "cpu", "dtype": dtype, "parallel": parallel, "options": {"pack_weights": False}}
    with hal.open({**config, "cache": {"dtype": cache}, "quantized_weights": weights}) as on:
        model = hal.load_model(checkpoint, on, progress=progress)
        held, experts = _nbytes(model), sum(_nbytes(each) for each in model.modules() if isinstance(each, Experts))
        with hal.Runner(model, on) as runner:
            slots = {"slots": runner.slots.take(2)} if runner.slots.needed else {}
            batch = runner.batch([list(range(40, 57)), list(range(3, 8))], [[1, 2], [3]], **slots)
            return {"logits": runner.step(batch).logits.clone(), "held": held, "experts": experts, "read": read}


def compiled_logits(
    checkpoint: str, dtype: str, compilers: list[str], parallel: dict[str, Any], on: dict[str, Any]
) -> dict[str, Any]:
    """Return the logits of a prefill and of a decode step, by compiler, and the bytes of the weights.

    Args:
        checkpoint: the folder, or the file.
        dtype: the dtype of computation.
        compilers: names of compilers.
        parallel: the configuration's table.
        on: further keys of the configuration.
    """
    found: dict[str, Any] = {}
    for compiler in compilers:
        compilation = {"compiler": compiler, "capture_sizes": [1]}
        with hal.open({"dtype": dtype, "parallel": parallel, "compilation": compilation, **on}) as backend:
            model = hal.load_model(checkpoint, backend)
            with hal.Runner(model, backend) as runner:
                steps = [runner.batch([[1, 7, 30, 4, 200, 19]], [[1]]), runner.batch([[5]], [[1]], cached=[6])]
                found[compiler] = torch.cat([runner.step(each, hal.step.ALL).logits.cpu().clone() for each in steps])
            found["held"] = _nbytes(model)
    return found


def image_logits(checkpoint: str, stories: list[Any], parallel: dict[str, Any]) -> dict[str, Any]:
    """Return the logits of all tokens of :class:`helpers.seeing.Story`, which ranks compute together."""
    from helpers.seeing import our_logits

    backend = hal.open({"backend": "cpu", "dtype": "float32", "parallel": parallel})
    with backend, hal.Runner(hal.load_model(checkpoint, backend), backend) as runner:
        return {"logits": torch.cat(our_logits(runner, stories))}


def _nbytes(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in [*module.parameters(), *module.buffers()])


def peak(checkpoint: str, warm: str, dtype: str, tensor: int, on: dict[str, Any]) -> dict[str, int]:
    """Load a checkpoint, and return the bytes of its weights, of what was read, and of the peak of memory.

    Args:
        checkpoint: the folder.
        warm: the folder of a small checkpoint, loaded before, so that the peak has nothing that is made only once, such
            as the kernels for each shape.
        dtype: the dtype of computation.
        tensor: the number of ranks.
        on: the configuration's backend and options.
    """
    read = 0

    def progress(done: int, total: int) -> None:
        nonlocal read
        read = done

    with hal.open({**on, "dtype": dtype, "parallel": {"tensor": tensor}}) as backend:
        hal.load_model(warm, backend)
        gc.collect()
        backend.device.empty_cache()
        backend.device.reset_peak()
        before = backend.device.memory_stats().allocated
        model = hal.load_model(checkpoint, backend, progress=progress)
        return {"held": _nbytes(model), "read": read, "peak": backend.device.memory_stats().peak - before}


def exchange(on: dict[str, Any], width: int, tokens: int, seed: int) -> dict[str, Any]:
    """Dispatch rows to experts on two NPUs and combine their doubles, eagerly and in a graph.

    Args:
        on: the configuration's backend and options.
        width: the width of a row.
        tokens: each rank's tokens.
        seed: of all ranks' tokens.

    Returns:
        What differs, and the launches of the eager call.
    """
    wrong, dispatch = [], ops.operation("expert_dispatch")
    assert dispatch.over_shards is not None
    with hal.open({**on, "parallel": {"tensor": 2, "experts": "dispatch"}}) as backend, torch.inference_mode():
        group, rank, device = backend.mesh.expert.name, backend.mesh.expert.rank, backend.device.torch
        draw = ops.Draw(torch.float16, seed=seed)
        weights = draw.normal(tokens, 3).abs()
        on_device = weights.to(device)
        x = torch.empty(tokens, width, dtype=torch.float16, device=device)
        experts = torch.empty(tokens, 3, dtype=torch.int32, device=device)

        def step() -> tuple[Tensor, Tensor]:
            rows, _, sent, received = ops.expert_dispatch(x, experts, 8, group)
            return rows, ops.expert_combine(rows * 2, experts, on_device, sent, received, 8, group)

        for replay in range(3):
            shards = [(draw.normal(tokens, width), routing(draw, tokens, 8, 3), 8, group) for _ in range(2)]
            x.copy_(shards[rank][0])
            experts.copy_(shards[rank][1])
            if replay == 0:
                with backend.counting_launches() as launches:
                    rows, result = step()
                graph = backend.graph()
                outputs = graph.capture(step)
            else:
                graph.replay()
                rows, result = outputs
            backend.device.synchronize()
            expected, counts, *_ = dispatch.over_shards(shards)[rank]
            used = int(counts.sum())
            doubled = shards[rank][0].float() * 2 * weights.float().sum(1, keepdim=True)
            if not torch.equal(rows[:used].cpu(), expected[:used]):
                wrong.append(f"rows of {replay}")
            if not torch.allclose(result.cpu().float(), doubled, rtol=4e-3, atol=4e-3):
                wrong.append(f"results of {replay}")
    return {"wrong": wrong, "launches": list(launches)}


def fused_collectives(
    tensor: int, dtype: str, seed: int, on: dict[str, Any] | None = None, rows: int = 8
) -> dict[str, Any]:
    """Call each fused collective. Returns the arguments without the group, the results, and the launches on an NPU.

    Args:
        tensor: the number of ranks.
        dtype: the dtype of the tensors.
        seed: of the tensors.
        on: the configuration's backend and options; None for the CPU.
        rows: rows of the arguments.
    """
    found: dict[str, Any] = {}
    with hal.open({**(on or {"backend": "cpu"}), "parallel": {"tensor": tensor}}) as backend:
        group = backend.mesh.tensor
        draw = ops.Draw(getattr(torch, dtype), seed=seed + group.rank)
        shared = ops.Draw(getattr(torch, dtype), seed=seed)
        for operation in ops.catalogue().values():
            if not (operation.collective and operation.fused):
                continue
            if operation.name == "all_reduce_add_rms_norm":
                calls = [(draw.normal(rows, 64), shared.normal(rows, 64), shared.normal(64), 1e-6)]
            else:
                calls = [
                    (draw.normal(rows, 256), draw.normal(96, 256, scale=0.1), bias) for bias in (None, draw.normal(96))
                ]
            results = []
            with backend.counting_launches() if backend.name == "npu" else nullcontext({}) as launches:
                for given in calls:
                    moved = [each.to(backend.device.torch) if isinstance(each, Tensor) else each for each in given]
                    result = getattr(ops, operation.name)(*moved, group.name)
                    results.append([each.cpu() for each in (result if isinstance(result, tuple) else (result,))])
            found[operation.name] = {"of": calls, "is": results, "launches": dict(launches)}
    return found


faulty = rank_faults.faulty


def opened_and_closed(on: dict[str, Any], parallel: dict[str, Any], times: int = 3) -> list[dict[str, list[str]]]:
    """Open and close a backend several times. Returns what is left of each time: memory, threads, torch.distributed.

    Args:
        on: the configuration's backend and options.
        parallel: the configuration's table.
        times: how often. Each time, the ranks reduce a tensor in each group of the mesh.
    """
    found = []
    for _ in range(times):
        before = _held()
        with hal.open({**on, "parallel": parallel}) as backend:
            for group in {each.name: each for each in (backend.mesh.tensor, backend.mesh.data)}.values():
                x = torch.full((1, 4), 2.0, device=backend.device.torch)
                assert ops.all_reduce(x, group.name).tolist() == [[2.0 * group.size] * 4]
        del backend, group, x
        gc.collect()
        found.append({name: sorted(held - before[name]) for name, held in _held().items()})
    return found


def _held() -> dict[str, Counter[str]]:
    """Return the memory that this process may share, its threads, and whether torch.distributed is started."""
    shared = [line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines()]
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            shared.append(os.readlink(each))
    threads = [each.read_text(encoding="ascii").strip() for each in Path("/proc/self/task").glob("*/comm")]
    # Each process group of torch_npu takes a stream of its pool, which stays. On the emulated CANN, it has a thread.
    threads = [each for each in threads if not re.fullmatch(r"npu\d+-stream\d+", each)]
    return {
        "memory": Counter(each for each in shared if "memfd:" in each or "/dev/shm" in each),
        "threads": Counter(threads),
        "started": Counter(["started"] * distributed.is_initialized()),
    }


def replaced(first: str, second: str, parallel: dict[str, Any]) -> dict[str, Tensor]:
    """Return the logits of the first checkpoint, of the second's weights in its place, and of the second."""
    from helpers.replacing import logits, tensors

    found = {}
    for name, folder in (("fresh", second), ("before", first)):
        config = {
            "backend": "cpu",
            "dtype": "float32",
            "parallel": parallel,
            "cache": {"num_tokens": 1024},
            "compilation": {"compiler": "graph", "capture_sizes": [1, 2]},
        }
        with hal.open(config) as backend, hal.Runner(hal.load_model(folder, backend), backend) as runner:
            found[name] = logits(runner)
            if name == "before":
                hal.replace_weights(runner, tensors(Path(second)))
                found["replaced"] = logits(runner)
    return found


def chosen(folder: str) -> dict[str, Tensor]:
    """Return the experts of a step and its logits, and the same with other experts given."""
    from hal.nn import keep_choices
    from hal.step import ALL

    config = {"backend": "cpu", "dtype": "float32", "parallel": {"tensor": 2}, "cache": {"num_tokens": 512}}
    with hal.open(config) as backend:
        model = hal.load_model(folder, backend)
        keep_choices(model, record=["experts"], replay=["experts"])
        with hal.Runner(model, backend) as runner:
            step = runner.step(runner.batch([list(range(5, 25))], [[1, 2]]), ALL)
            found = {"own": step.extra["experts"].clone(), "logits": step.logits.clone()}
            given = {"given_experts": found["own"].roll(1, 0).flatten(1)}
            step = runner.step(runner.batch([list(range(5, 25))], [[3, 4]], **given), ALL)
            return {**found, "given": step.extra["experts"].clone(), "other logits": step.logits.clone()}


def replayed_texts(folder: str, prompt: list[int], text: list[int]) -> dict[str, Tensor] | None:
    """Return a text's recorded experts, and its log-probabilities plain, with them, and with others; on rank 0."""
    config = {"parallel": {"tensor": 2}, "cache": {"num_tokens": 512}}
    kept: Any = {"record": ["experts"], "replay": ["experts"]}
    with hal.LLM(folder, backend="cpu", dtype="float32", compiler="eager", config=config, **kept) as llm:
        if not llm.first:
            return None
        (made,) = llm.generate([[*prompt, *text]], max_new_tokens=1, temperature=0.0)
        experts = made.choices["experts"]
        found = {"experts": experts, "plain": llm.log_probabilities([prompt], [text])[0]}
        for name, given in (("own", experts), ("altered", experts.flip(0))):
            (found[name],) = llm.log_probabilities([prompt], [text], choices=[{"experts": given}])
        return found


def broadcast_weights(first: str, second: str) -> dict[str, Any]:
    """Send the second checkpoint's weights from rank 0 to a hal.LLM with the first's in rank 1, then wrong ones."""
    from hal.errors import CheckpointError
    from hal.parallel import receive_weights, send_weights
    from helpers.replacing import PROMPTS, tensors

    if distributed.get_rank() == 0:
        new = tensors(Path(second))
        send_weights(new)
        send_weights({"nonsense": torch.ones(2), **new})
        send_weights((name, each.double()) for name, each in tensors(Path(first)).items())
        return {}

    def texts() -> list[list[int]]:
        given: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        return [list(each.token_ids) for each in llm.generate([list(each) for each in PROMPTS], **given)]

    with hal.LLM(first, backend="cpu", dtype="float32", config={"cache": {"num_tokens": 1024}}) as llm:
        found: dict[str, Any] = {"before": texts(), "refused": False}
        llm.replace_weights(receive_weights())
        found["after"] = texts()
        try:
            llm.replace_weights(receive_weights())
        except CheckpointError:
            found["refused"] = True
        llm.replace_weights(receive_weights())
        return {**found, "again": texts()}


def rollout(first: str, second: str) -> dict[str, Any]:
    """Return texts of a shared hal.LLM whose weights are replaced, and which sleeps; nothing on ranks but the first."""
    from hal.errors import CheckpointError
    from helpers.replacing import PROMPTS, tensors

    config = {"parallel": {"tensor": distributed.get_world_size()}, "cache": {"num_tokens": 1024}}
    given: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    with hal.LLM(first, backend="cpu", dtype="float32", compiler="graph", config=config) as llm:
        if not llm.first:
            return {}

        def texts() -> list[list[int]]:
            return [list(each.token_ids) for each in llm.generate([list(each) for each in PROMPTS], **given)]

        found: dict[str, Any] = {"before": texts(), "refused": False}
        llm.replace_weights(tensors(Path(second)))
        found["replaced"] = texts()
        llm.replace_weights(first)
        found["from files"] = texts()
        try:
            llm.replace_weights({"nonsense": torch.ones(1)})
        except CheckpointError:
            found["refused"] = True
        llm.sleep(weights="files")
        llm.wake()
        found["woken"] = texts()
        llm.sleep(weights="none")
        llm.wake("weights")
        llm.replace_weights(tensors(Path(second)))
        llm.wake()
        return {**found, "new": texts()}


def adapted_texts(
    base: str, folders: dict[str, str], prompts: list[list[int]], new: int, on: dict[str, Any]
) -> dict[str, Any]:
    """Return the tokens of prompts with each adapter, and after a change of one; nothing on ranks but the first."""
    from hal.errors import CheckpointError

    first, second = list(folders)[:2]
    config = {"parallel": {"tensor": distributed.get_world_size()}, "cache": {"num_tokens": 2048}, **on}
    found: dict[str, Any] = {}
    with hal.LLM(base, adapters=folders, config=config) as llm:
        if not llm.first:
            return found

        def texts(name: str | None) -> list[list[int]]:
            made = llm.generate(prompts, adapter=name, max_new_tokens=new, temperature=0.0, ignore_eos=True)
            return [list(each.token_ids) for each in made]

        found = {name: texts(name) for name in folders} | {"none": texts(None), "refused": False}
        llm.load_adapter(first, folders[second])
        found["changed"] = texts(first)
        try:
            llm.load_adapter(first, base)
        except CheckpointError:
            found["refused"] = True
        llm.remove_adapter(second)
        return {**found, "names": llm.adapters, "after": texts(first)}


def family_difference(folder: str, family: str, compiler: str, tensor: int) -> float:
    """Return how far the logits of a model of transformers differ from its own, in parts of the largest.

    Args:
        folder: its checkpoint.
        family: the model_type.
        compiler: the compiler.
        tensor: the number of ranks.
    """
    sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]  # As for all tests of the core.
    from helpers.family_steps import config_for, differences, own_logits, tokens_for
    from helpers.transformers_families import model_of

    model = model_of(family)
    rows = tokens_for(model.config.vocab_size)
    config = config_for(compiler, parallel={"tensor": tensor})
    with hal.open(config) as backend, hal.Runner(hal.load_model(folder, backend), backend) as runner:
        return max(differences(runner, rows, own_logits(model, rows)).values())
