"""Compares models on the npu backend with the cpu backend.

A plan simulates an engine: the sequences of each step, their order, and their blocks. The CPU runs it in the dtype and
chooses the tokens, then runs it again in float32 on the same weights and tokens. The NPU runs it on those tokens too,
step by step. The tolerance is :class:`hal.ops.rounding.ReferenceLogits`, with the CPU's kernels as reference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.ops.rounding import MANY_TOKENS, Agreement, ReferenceLogits, check_choice, check_logits, rms
from hal.step import ALL
from helpers import checkpoints, reference

BLOCK = 128
DTYPES = ("float16", "bfloat16")
NEW_TOKENS = 24
"""The tokens that a plan adds to each prompt."""

BUCKETS = ((1, 2, 4, 8), (2, 4, 8), (3, 6), (1, 5))
"""Lists of capture sizes, which random configurations use in turn."""

PREFILLS = (16, 64, 256)
"""Capture sizes of prefills, if those are captured: some prompts fit, and some are longer."""


# Configurations.


def draw_config(family: str, seed: int) -> dict[str, Any]:
    """Draw a small config.json. The main choices depend on the seed's number, so that few seeds cover all of them."""
    draw = random.Random(f"{family} {seed}")
    kv_heads, layers = 1 + seed // 8 % 2, 1 + seed % 3
    config: dict[str, Any] = {
        "vocab_size": draw.randint(100, 300),
        "hidden_size": draw.choice((48, 64, 80)),
        "intermediate_size": draw.choice((48, 64, 128)),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * (1 + seed % 8),
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice((16, 32, 48, 64, 128)),
        "max_position_embeddings": 512,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "hidden_act": "silu",
        "attention_bias": seed // 2 % 2 == 1,
        "tie_word_embeddings": seed // 3 % 2 == 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice((1e4, 5e5))},
    }
    window = draw.choice((1, 9, 40, BLOCK, 150)) if (seed + seed // 8) % 2 else None
    if family == "qwen3":
        config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        if window is not None:
            types = [draw.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
            types[draw.randrange(layers)] = "sliding_attention"
            config |= {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
        return config
    config["rope_parameters"] |= draw_rope(draw, ("default", "linear", "llama3", "yarn")[seed // 2 % 4])
    if window is not None:
        config["attention_bias"] = False
        return config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": seed // 4 % 2 == 1}


def draw_rope(draw: random.Random, rope_type: str) -> dict[str, Any]:
    """Draw the rope scaling."""
    rope: dict[str, Any] = {"rope_type": rope_type}
    if rope_type != "default":
        rope["factor"] = draw.choice((2.0, 2.5, 8.0))
    if rope_type in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = draw.choice((32, 128))
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return rope


def write_checkpoint(config: dict[str, Any], dtype: str, seed: int, folder: Path) -> Path:
    """Write a checkpoint of random weights that the dtype represents exactly, so that all runs use the same ones."""
    config = config | {"dtype": dtype}
    # All families have the numbers of Qwen3, whose norms the others leave out: with them, one fault is noticed.
    weights = checkpoints.random_weights({**config, "model_type": "qwen3"}, seed)
    inner, width = config["intermediate_size"], config["hidden_size"]
    if config["model_type"] != "qwen3":
        left_out = ("q_norm.weight", "k_norm.weight")
        weights = {name: weight for name, weight in weights.items() if not name.endswith(left_out)}
    if config.get("mlp_bias"):
        generator = torch.Generator().manual_seed(seed)
        for layer in range(config["num_hidden_layers"]):
            for part, size in (("gate_proj", inner), ("up_proj", inner), ("down_proj", width)):
                noise = 1 + 0.1 * torch.randn(size, generator=generator)
                weights[f"model.layers.{layer}.mlp.{part}.bias"] = noise.to(getattr(torch, dtype))
    for name, weight in weights.items():
        if name.endswith("bias"):
            weight.sub_(1).mul_(4)
        elif name.endswith(("q_norm.weight", "q_proj.weight")):
            weight.mul_(2)  # Makes attention attend to some tokens much more than to others,
        elif name.endswith("k_proj.weight"):  # and one head mostly to the token itself.
            head = slice(0, config["head_dim"])
            weight[head] += 0.15 * weights[name.replace("k_proj", "q_proj")][head]
    folder.mkdir(parents=True)
    checkpoints.write_json(folder / "config.json", config)
    checkpoints.write_weights(folder, weights)
    return folder


# Plans.


@attrs.frozen
class Call:
    """One step: the sequences that run, the number of new tokens of each, and its blocks."""

    phase: str
    rows: list[int]
    starts: list[int]
    stops: list[int]
    blocks: list[list[int]]
    waits: bool


@attrs.frozen
class Plan:
    """Prompts, and the calls that extend each of them to ``len(prompt) + NEW_TOKENS`` tokens.

    ``drawn`` has the new tokens of sequences that do not continue greedily. A small random model soon repeats itself,
    and then attention has no effect on its tokens.
    """

    prompts: list[list[int]]
    drawn: dict[int, list[int]]
    calls: list[Call]
    num_blocks: int
    max_prefill_tokens: int

    def first(self, calls: int) -> Plan:
        """Return the plan with only its first calls."""
        return attrs.evolve(self, calls=self.calls[:calls])


def around(buckets: Sequence[int]) -> list[int]:
    """Return every bucket, and the sizes just below and above."""
    return sorted({size + step for size in buckets for step in (-1, 0, 1)} - {0})


def draw_prompts(draw: random.Random, count: int, vocab_size: int) -> list[list[int]]:
    """Draw random prompts.

    Some cross into another block, some end just before one, and some do so with their new tokens.
    """
    edges = [1, BLOCK - NEW_TOKENS, BLOCK - NEW_TOKENS + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 5]
    lengths = [*edges, *(draw.randint(1, 2 * BLOCK) for _ in range(count))][:count]
    draw.shuffle(lengths)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def draw_plan(draw: random.Random, prompts: list[list[int]], sizes: Sequence[int], vocab_size: int | None) -> Plan:
    """Draw decode batches of all ``sizes`` in turn, of sequences in any order.

    Sequences join when a batch needs them and leave when they are finished, and others reuse their blocks. In between
    they may pause. Some prompts are prefilled in two parts. With ``vocab_size``, half of the sequences continue with
    random tokens.
    """
    calls: list[Call] = []
    free: list[int] = []
    owned: dict[int, list[int]] = {}
    length: dict[int, int] = {}
    highest = 0
    waiting = list(range(len(prompts)))

    def call(phase: str, rows: list[int], stops: list[int]) -> None:
        nonlocal highest
        for row, stop in zip(rows, stops, strict=True):
            while len(owned[row]) * BLOCK < stop:
                if not free:
                    highest += 1
                owned[row].append(free.pop() if free else highest)
        starts = [length[row] for row in rows]
        length.update(zip(rows, stops, strict=True))
        calls.append(Call(phase, rows, starts, stops, [list(owned[row]) for row in rows], draw.random() < 0.5))

    targets: list[int] = []
    while waiting or owned:
        if not targets:
            targets = draw.sample(sizes, len(sizes))
        target = targets.pop()
        joining = waiting[: max(0, target - len(owned))]
        if joining:
            del waiting[: len(joining)]
            owned |= {row: [] for row in joining}
            length |= dict.fromkeys(joining, 0)
            if parted := [row for row in joining if len(prompts[row]) > 1 and draw.random() < 0.3]:
                call("prefill", parted, [draw.randrange(1, len(prompts[row])) for row in parted])
            call("prefill", joining, [len(prompts[row]) for row in joining])
        rows = draw.sample(sorted(owned), min(target, len(owned)))
        call("decode", rows, [length[row] + 1 for row in rows])
        for row in rows:
            if length[row] == len(prompts[row]) + NEW_TOKENS:
                free += owned.pop(row)
    # Blocks from the whole cache.
    place = [0, *draw.sample(range(1, highest + 1), highest)]
    calls = [attrs.evolve(each, blocks=[[place[block] for block in row] for row in each.blocks]) for each in calls]
    drawn = {}
    if vocab_size is not None:
        drawn = {row: [draw.randrange(vocab_size) for _ in range(NEW_TOKENS)] for row in range(0, len(prompts), 2)}
    return Plan(prompts, drawn, calls, highest, draw.choice((100, 2048)))


# Runs.


@attrs.frozen
class Run:
    """The result of a plan: per sequence, its tokens, and the logits ``[tokens, vocab_size]`` after each that ran."""

    texts: list[list[int]]
    logits: list[Tensor]


def open_backend(name: str, dtype: str, compiler: str, plan: Plan, buckets: Sequence[int] | None) -> hal.Backend:
    """Open and activate a backend for a plan."""
    compilation: dict[str, Any] = {"compiler": compiler, "capture_sizes": buckets and list(buckets)}
    if compiler in ("piecewise", "piecewise_eager"):
        compilation["prefill"] = {"capture_sizes": list(PREFILLS)}
    return hal.open(
        {
            "backend": name,
            "dtype": dtype,
            "max_prefill_tokens": plan.max_prefill_tokens,
            "compilation": compilation,
            "cache": {"num_tokens": plan.num_blocks * BLOCK, "block_size": BLOCK},
        }
    )


def new_runner(model: Any, backend: hal.Backend) -> hal.Runner:
    """Return a runner whose cache is filled with NaN: slots must be written before they are read."""
    runner = hal.Runner(model, backend)
    fill_caches(runner, math.nan)
    return runner


def fill_caches(runner: hal.Runner, value: float) -> None:
    """Overwrite what the caches hold, except for the blocks of padding."""
    with torch.inference_mode():
        for _, cache in runner.states.tensors():
            cache[1:] = value


def run(
    runner: hal.Runner,
    plan: Plan,
    texts: list[list[int]] | None = None,
    tamper: Callable[[int, hal.step.Batch], hal.step.Batch] | None = None,
) -> Run:
    """Run a plan on ``texts``, by default on the plan's, or else on greedy tokens.

    ``tamper`` may change the batch of each call. The results of steps that do not wait are read at the end.
    """
    chosen = [list(prompt) for prompt in plan.prompts]
    parts: list[list[Tensor]] = [[] for _ in plan.prompts]
    results: list[Tensor] = []
    for number, call in enumerate(plan.calls):
        source = texts or chosen
        new = [source[row][start:stop] for row, start, stop in zip(call.rows, call.starts, call.stops, strict=True)]
        batch = runner.batch(new, call.blocks, cached=call.starts)
        if tamper is not None:
            batch = tamper(number, batch)
        # A copy: a replay's logits are valid until the next one. Under inference mode, like the original.
        with torch.inference_mode():
            logits = runner.step(batch, ALL).logits.clone()
        results.append(logits.cpu() if call.waits else logits)
        if texts is None:
            ends = torch.tensor([len(tokens) for tokens in new]).cumsum(0) - 1
            for row, stop, token in zip(call.rows, call.stops, logits[ends].argmax(-1).tolist(), strict=True):
                if stop == len(chosen[row]):
                    done = stop - len(plan.prompts[row])
                    chosen[row].append(plan.drawn[row][done] if done < NEW_TOKENS and row in plan.drawn else token)
    for call, logits in zip(plan.calls, results, strict=True):
        counts = [stop - start for start, stop in zip(call.starts, call.stops, strict=True)]
        for row, part in zip(call.rows, logits.cpu().split(counts), strict=True):
            parts[row].append(part)
    return Run(texts or chosen, [torch.cat(part) if part else torch.empty(0, 1) for part in parts])


@attrs.frozen
class Case:
    """A checkpoint, a plan, the CPU's results, and the CPU's rounding error."""

    path: Path
    dtype: str
    plan: Plan
    buckets: Sequence[int] | None
    rounded: Run
    known: ReferenceLogits


def build_case(path: Path, dtype: str, plan: Plan, buckets: Sequence[int] | None) -> Case:
    """Run the CPU's part of a case."""

    def on_cpu(as_dtype: str, texts: list[list[int]] | None) -> Run:
        backend = open_backend("cpu", as_dtype, "eager", plan, buckets)
        return run(new_runner(hal.load_model(path, backend), backend), plan, texts)

    rounded = on_cpu(dtype, None)
    exact = on_cpu("float32", rounded.texts)
    known = ReferenceLogits.of(rounded.logits, exact.logits, getattr(torch, dtype))
    return Case(path, dtype, plan, buckets, rounded, known)


def random_case(family: str, seed: int, dtype: str, folder: Path, *, count: int = 12) -> Case:
    """Return a case of a random configuration with this many sequences."""
    config, draw, buckets = draw_config(family, seed), random.Random(seed), BUCKETS[seed % len(BUCKETS)]
    path = write_checkpoint(config, dtype, seed, folder / f"{family}-{seed}-{dtype}")
    prompts = draw_prompts(draw, count, config["vocab_size"])
    return build_case(path, dtype, draw_plan(draw, prompts, around(buckets), config["vocab_size"]), buckets)


def trained_case(path: Path, dtype: str, buckets: Sequence[int], count: int) -> Case:
    """Return a case of the trained checkpoint, on Python code to continue: a few long texts and many short ones.

    A config without capture sizes uses the backend's default, which ``buckets`` must match.
    """
    draw = random.Random(len(buckets))
    tokenizer = Checkpoint.open(path).tokenizer()
    text = tokenizer.encode(Path(reference.__file__).read_text(encoding="utf-8")).ids
    prompts = reference.prompts(path)
    for length in (BLOCK - NEW_TOKENS + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 5):
        prompts.append(text[:length])
    while len(prompts) < count:
        start = draw.randrange(len(text) - 50)
        prompts.append(text[start : start + draw.randint(1, 40)])
    draw.shuffle(prompts)
    return build_case(path, dtype, draw_plan(draw, prompts[:count], around(buckets), None), buckets)


def on_npu(case: Case, mode: str) -> tuple[Any, hal.Backend]:
    """Return the model of a case, and a backend that runs it in a mode."""
    backend = open_backend("npu", case.dtype, mode, case.plan, case.buckets)
    return hal.load_model(case.path, backend), backend


# Comparisons.


def same_bits(ours: Run, whole: Run) -> None:
    """Check that the logits of a run equal those of another bit for bit; the other may be longer.

    Raises:
        AssertionError: they are not.
    """
    for row, (mine, theirs) in enumerate(zip(ours.logits, whole.logits, strict=True)):
        wrong = (mine != theirs[: mine.shape[0]]).any(-1).nonzero().flatten().tolist() if mine.numel() else []
        assert not wrong, f"sequence {row}: other logits at tokens {wrong}"


def compare(ours: Run, case: Case) -> Agreement:
    """Check the NPU's logits and greedy choices against the CPU's.

    Raises:
        AssertionError: they differ by more than rounding.
    """
    for row, (mine, rounded) in enumerate(zip(ours.logits, case.rounded.logits, strict=True)):
        assert mine.shape == rounded.shape, f"sequence {row}: logits of {mine.shape[0]} tokens, not {rounded.shape[0]}"
    found = {(row, at): each for row, logits in enumerate(ours.logits) for at, each in enumerate(logits)}
    return check_logits(found, case.known, MANY_TOKENS)


REROUTED = 0.005
"""Share of texts whose last token a near tie of a router may send to other experts in one of two correct runs.

Sequences that begin alike share their ties, so that each text counts once. Seen: 0.005, of 1,146 texts.
"""


def compare_routed(ours: Run, case: Case) -> Agreement:
    """Check a mixture of experts like :func:`compare`, except for a few tokens, which may have taken other experts.

    Raises:
        AssertionError: more tokens are off than near ties explain, or the others differ by more than rounding.
    """
    known = case.known

    def check_few(places: Sequence[tuple[int, int]]) -> None:
        few, texts = ({tuple(case.rounded.texts[row][: at + 1]) for row, at in each} for each in (places, found))
        assert len(few) <= REROUTED * len(texts), places

    found = {(row, at): each for row, logits in enumerate(ours.logits) for at, each in enumerate(logits)}
    distances = {place: float(rms(each.double() - known.exact[place[0]][place[1]])) for place, each in found.items()}
    errors = {(row, at): float(known.errors[row][at]) for row, at in found}
    ties = 0
    off = []
    for place, logits in found.items():
        try:
            assert distances[place] <= MANY_TOKENS.token * (errors[place] + known.mean)
            ties += check_choice("", int(logits.argmax()), known, *place)
        except AssertionError:
            off.append(place)
    check_few(off)
    # In the CPU's rounded run, too, tokens take other experts. Each outweighs hundreds of others in the mean.
    typical = math.hypot(*distances.values()) / math.sqrt(len(found))
    theirs = [place for place, error in errors.items() if error > MANY_TOKENS.token * (distances[place] + typical)]
    check_few(theirs)
    others = found.keys() - set(off + theirs)
    mean = math.hypot(*(distances[each] for each in others)) / math.hypot(*(errors[each] for each in others))
    assert mean <= MANY_TOKENS.mean
    return Agreement(len(found), mean, max(distances.values()), ties)
