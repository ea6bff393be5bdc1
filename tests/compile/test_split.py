"""Tests of the splitting of steps: random programs are cut at random operations, and compared with the uncut program.

The programs need sizes of values of earlier pieces, numbers computed from them, parts of tuples, and values that later
pieces write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.thorough import LONG, thorough
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import hal
from hal.compile.fx.make_graph import make_graph
from hal.compile.pass_manager import PassManager
from hal.compile.split import SplitStep, split
from hal.compile.trace import StepSizes, TracedStep
from hal.step import Batch, fields_of

NAMES = ("token_ids", "positions", "block_table")
SEEDS = range(40)
AT = ("rms_norm", "add_rms_norm", "silu_and_mul")
Values = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def cpu() -> hal.Backend:
    return hal.open({"backend": "cpu", "dtype": "float32"})


class Program:
    """A random function of batch fields and a weight; ``rows`` have a row per token, ``doubles`` two."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, token_ids: Tensor, positions: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor]:
        self.draw = random.Random(self.seed)
        self.token_ids, self.table, self.weight = token_ids, table, weight
        self.rows = [token_ids[:, None] * weight, (positions[:, None] * weight).sin()]
        self.doubles = [torch.cat([self.rows[0], self.rows[1]])]
        for _ in range(10):
            self.draw.choice(STEPS)(self)
        total = sum(self.rows[1:], self.rows[0])
        for each in self.doubles:
            total = total + each.unflatten(0, (2, -1)).sum(0)
        return (total,)

    @property
    def row(self) -> Tensor:
        return self.draw.choice(self.rows)

    @property
    def double(self) -> Tensor:
        return self.draw.choice(self.doubles)


def norm(program: Program) -> None:
    program.rows.append(torch.ops.hal.rms_norm.default(program.row, program.weight, 1e-6))


def tuple_of_norms(program: Program) -> None:
    parts = torch.ops.hal.add_rms_norm.default(program.row, program.row, program.weight, 1e-6)
    program.rows += parts if program.draw.random() < 0.5 else parts[:1]


def activation(program: Program) -> None:
    program.rows.append(torch.ops.hal.silu_and_mul.default(torch.cat([program.row, program.row], 1)))


def arithmetic(program: Program) -> None:
    program.rows.append(program.row * 0.5 + program.row)


def joined(program: Program) -> None:
    program.doubles.append(torch.cat([program.row, program.row]))


def size_alone(program: Program) -> None:
    program.doubles.append(torch.ones(program.double.shape[0], 4) * program.weight)


def size_of_a_row_alone(program: Program) -> None:
    program.doubles.append(torch.ones(program.row.shape[0] * 2, 4))


def half_of_a_size(program: Program) -> None:
    program.rows.append(program.row + torch.ones(program.double.shape[0] // 2, 1))


def size_as_a_number(program: Program) -> None:
    program.rows.append(program.row * (program.double.shape[0] + program.row.shape[0]))


def range_of_a_size(program: Program) -> None:
    program.rows.append(program.row + torch.arange(program.row.shape[0])[:, None])


def some_of_the_rows(program: Program) -> None:
    program.rows.append(program.double[: program.row.shape[0]] * 2)


def size_of_what_was_written(program: Program) -> None:
    made = program.row.clone()
    made.add_(1)
    program.doubles.append(torch.ones(2 * made.add_(1).shape[0], 4))
    if program.draw.random() < 0.5:
        program.rows.append(made)


def written_later(program: Program) -> None:
    program.row.mul_(0.5)


def view_that_is_written(program: Program) -> None:
    made = program.row.clone()
    program.rows.append(made)
    view = made[:, :2]
    norm(program)
    made.mul_(0.5)
    program.rows.append(torch.cat([view, view], 1))


def parts_of_a_tuple(program: Program) -> None:
    values, _ = torch.topk(program.row, 3)
    first, second = program.row.split(2, 1)
    program.rows.append(torch.cat([second, values[:, :1], first[:, :1]], 1))


def sizes_of_sequences(program: Program) -> None:
    columns = torch.cat([program.table, program.table], 1)
    if program.draw.random() < 0.5:
        norm(program)
    program.rows.append(program.row + torch.ones(columns.shape[1], 4).mean(0))


STEPS: Sequence[Callable[[Program], None]] = (
    norm,
    norm,
    tuple_of_norms,
    activation,
    arithmetic,
    joined,
    size_alone,
    size_of_a_row_alone,
    half_of_a_size,
    size_as_a_number,
    range_of_a_size,
    some_of_the_rows,
    size_of_what_was_written,
    written_later,
    view_that_is_written,
    parts_of_a_tuple,
    sizes_of_sequences,
)


def traced(program: Callable[..., Any], weight: Tensor) -> TracedStep:
    fields = {name: fields_of(Batch)[name] for name in NAMES}
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    sizes = StepSizes(None).of_axes(shapes)
    with mode:
        fakes = [torch.empty(each.shape(sizes), dtype=each.dtype) for each in fields.values()]
    fakes.append(mode.from_tensor(weight, static_shapes=True))
    graph = make_graph(program, fakes, mode)
    PassManager(graph, mode).apply()
    return TracedStep(graph, [weight], sizes, 0, fields, mode)


def run(cut: SplitStep, batch: Values, tokens: int, bucket: int) -> Tensor:
    """Run a step as the piecewise form does: captured segments on the bucket's tokens, the others on the batch's."""
    values, fixed = dict(batch), dict[str, Tensor]()
    for name in ("token_ids", "positions"):
        fixed[name] = torch.zeros(bucket, dtype=batch[name].dtype)
        fixed[name][:tokens] = batch[name]
    read = {name for each in cut.segments if each.captured for name in each.inputs}
    for segment in cut.segments:
        results = segment.run(*[(fixed if segment.captured else values)[name] for name in segment.inputs])
        for output, result in zip(segment.outputs, results, strict=True):
            if segment.captured:
                fixed[output.name] = result
            elif output.row is not None and output.name in read:
                fixed[output.name] = torch.zeros(bucket, *output.row, dtype=output.dtype)
                fixed[output.name][:tokens] = result
                result = fixed[output.name][:tokens]
            values[output.name] = result if output.row is None else result[:tokens]
    (name,) = cut.returned
    return values[name]


def drawn_batch(seed: int, tokens: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    fields = {name: fields_of(Batch)[name] for name in NAMES}
    shapes = {name: each.shape({"tokens": tokens, "sequences": 2, "blocks": 3}) for name, each in fields.items()}
    return {
        name: torch.randint(1, 9, shape, generator=generator).to(fields[name].dtype) for name, shape in shapes.items()
    }


def check(program: Callable[..., Any], at: Sequence[str], seed: int) -> SplitStep:
    weight = torch.tensor([0.1, -0.2, 0.3, 0.4])
    cut = split(traced(program, weight), at=at)
    for tokens, bucket in ((5, 5), (6, 9)):
        batch = drawn_batch(seed, tokens)
        (expected,) = program(*[each.clone() for each in batch.values()], weight)
        found = run(cut, batch, tokens, bucket)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return cut


@thorough(LONG)
def test_random_programs_cut_at_random_operations() -> None:
    cuts = pieces = 0
    for seed in SEEDS:
        print(f"seed {seed}")  # noqa: T201 - pytest prints it with a failure
        at = [name for name in AT if random.Random(seed).random() < 0.7]
        cut = check(Program(seed), at, seed)
        cuts += len(cut.segments) > 1
        pieces += any(each.captured for each in cut.segments)
    assert cuts > len(SEEDS) / 2
    assert pieces > len(SEEDS) / 2


def needs_a_size(token_ids: Tensor, positions: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor]:
    rows = token_ids[:, None] * weight
    both = torch.cat([rows, rows])
    rows = torch.ops.hal.rms_norm.default(rows, weight, 1e-6)
    return (rows + torch.ones(both.shape[0], 4).unflatten(0, (2, -1)).sum(0),)


def needs_a_number(token_ids: Tensor, positions: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor]:
    rows = torch.ops.hal.rms_norm.default(token_ids[:, None] * weight, weight, 1e-6)
    return (rows * token_ids.shape[0],)


@pytest.mark.parametrize(
    ("program", "captured"), [(needs_a_size, [True, False, True]), (needs_a_number, [True, False])]
)
def test_a_later_piece_needs_only_a_size(program: Callable[..., Any], captured: list[bool]) -> None:
    assert [each.captured for each in check(program, ["rms_norm"], 0).segments] == captured


def test_a_shape_does_not_end_a_piece() -> None:
    def program(token_ids: Tensor, positions: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor]:
        rows = torch.ones(token_ids.shape[0], 4) * token_ids[:, None]
        return (rows.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4) + torch.arange(token_ids.shape[0])[:, None],)

    cut = check(program, ["rms_norm"], 0)
    assert [each.captured for each in cut.segments] == [True]
