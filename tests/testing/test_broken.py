"""Tests that some case detects every bug with a clear message, and that the correct twin passes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import attrs
import pytest
from helpers import broken
from helpers.broken import Twin
from helpers.thorough import AGAIN, MODE, thorough

import hal
from hal.errors import CaptureError
from hal.testing import Conformance


@attrs.frozen
class Flaw:
    """A bug.

    Attributes:
        name: its description.
        open: opens the driver with the bug.
        fails: cases that must fail, and a part of each message.
        passes: cases that must pass, because they test something else.
    """

    name: str
    open: Callable[[], hal.Backend]
    fails: dict[str, str]
    passes: tuple[str, ...] = ()


def kernel(name: str, make: Callable[[], object]) -> Callable[[], hal.Backend]:
    return lambda: Twin(kernels={name: make()})


THREE = hal.vendor.Limits(block_sizes=(64, 32, 48))
SIXTEEN = hal.vendor.Limits(max_streams=16)
LIMITS = {"a limit told wrong": THREE, "a limit of streams told wrong": SIXTEEN}
"""Limits that differ from the CPU driver's; the twins have them too."""
FLAWS = (
    Flaw(
        "a wrong epsilon",
        kernel("rms_norm", lambda: broken.wrong_epsilon),
        {"operations/rms_norm/float32/sample-5": "result 0 is off"},
        ("operations/rms_norm/float16/sample-0",),
    ),
    Flaw(
        "float16 accumulation",
        kernel("linear", lambda: broken.accumulates_in_half),
        {"operations/linear/float16/sample-2": "result 0 is off"},
        ("operations/linear/float32/sample-2", "operations/linear/bfloat16/sample-2"),
    ),
    Flaw(
        "squares that overflow float16",
        kernel("rms_norm", lambda: broken.sums_squares_in_half),
        {"operations/rms_norm/float16/large": "result 0 is off"},
        ("operations/rms_norm/float32/large",),
    ),
    Flaw(
        "lengths not updated at replay",
        lambda: Twin(tape=broken.StaleLengths),
        {"graphs/host-values/lengths": "a replay with lengths", "runners/graph/padding": "logits are"},
        ("graphs/inputs-in-place", "runners/eager/padding"),
    ),
    Flaw(
        "host values that are not recorded",
        lambda: Twin(tape=broken.ForgetsHostValues),
        {"graphs/host-values/lengths": "did not record query_start_loc_host and kv_lens_host, which"},
        ("graphs/inputs-in-place",),
    ),
    Flaw(
        "host values looked at after the launch",
        lambda: Twin(tape=broken.LaunchesFirst),
        {"graphs/host-values/short": "refused the host values, but launched work"},
        ("graphs/host-values/lengths",),
    ),
    Flaw(
        "an output that aliases an input",
        kernel("rotary_embedding", lambda: broken.rotates_in_place),
        {"operations/rotary_embedding/float32/sample-1": "result 0 aliases the argument query"},
    ),
    Flaw(
        "a stale buffer read",
        kernel("silu_and_mul", broken.KeepsScratch),
        {"operations/silu_and_mul/float32/sample-1": "result 0 is off"},
        ("operations/silu_and_mul/float32/sample-0",),
    ),
    Flaw(
        "results of two calls in one memory",
        kernel("silu_and_mul", broken.KeepsResult),
        {"operations/silu_and_mul/float32/sample-1": "two calls returned results in the same memory"},
    ),
    Flaw(
        "a row never written",
        kernel("rms_norm", lambda: broken.leaves_a_row),
        {"operations/rms_norm/float32/sample-1": "result 0 is off"},
    ),
    Flaw(
        "a wrong padding row",
        kernel("paged_attention", lambda: broken.fills_padding),
        {"operations/paged_attention/float32/sample-4": "result 0 is off"},
        ("operations/paged_attention/float32/sample-3", "limits/block_sizes/16/float32"),
    ),
    Flaw(
        "padding written where a sequence lives",
        kernel("store_kv_cache", lambda: broken.pads_into_block_1),
        {"runners/graph/padding": "a step wrote block 1, offset 0|logits are"},
        ("runners/eager/padding",),
    ),
    Flaw(
        "an off-by-one at a cache block's edge",
        kernel("paged_attention", lambda: broken.stops_before_the_edge),
        {
            "limits/block_sizes/16/float32": "times the allowed difference",
            "runners/eager/block-edges": "logits are",
            "operations/paged_attention/float32/sample-3": "result 0 is off",
        },
        ("operations/paged_attention/float32/sample-0", "runners/eager/order"),
    ),
    Flaw(
        "a limit told wrong",
        lambda: Twin(kernels={"paged_attention": broken.takes_no_48}, limits=THREE),
        {"limits/block_sizes/48/float32": "blocks of 48 tokens"},
        ("limits/block_sizes/32/float32",),
    ),
    Flaw(
        "a limit of streams told wrong",
        lambda: Twin(limits=SIXTEEN, tape=broken.Few),
        {"limits/streams": "the ninth graph"},
        ("graphs/several",),
    ),
    Flaw(
        "memory leaked by a kernel",
        kernel("silu_and_mul", broken.KeepsAll),
        {"leaks/operations/silu_and_mul": "24 more tensors are alive", "leaks/steps/eager": "more tensors are alive"},
        ("leaks/operations/rms_norm", "operations/silu_and_mul/float32/sample-1"),
    ),
    Flaw("graphs that never die", lambda: Twin(tape=broken.NeverDies), {"leaks/graphs": "after 24 graphs"}),
    Flaw(
        "an error swallowed",
        kernel("silu_and_mul", lambda: broken.swallows),
        {"errors/kernel/silu_and_mul": "it must raise"},
        ("errors/kernel/rms_norm",),
    ),
    Flaw(
        "an error swallowed by a capture",
        lambda: Twin(tape=broken.ForgetsErrors),
        {"graphs/error-inside/exception": "capture\\(\\) swallowed"},
        ("graphs/inputs-in-place",),
    ),
    Flaw(
        "an error wrapped by a capture",
        lambda: Twin(tape=broken.WrapsErrors),
        {"graphs/error-inside/own": "raised Planted\\('planted'\\), but capture\\(\\) raised CaptureError"},
        ("graphs/error-inside/interrupt", "graphs/error-inside/hal-error"),
    ),
    Flaw(
        "a cache kept when it is closed",
        broken.KeepsCaches,
        {"closing/runner/eager": "4 of 4 tensors of the cache are alive after the runner was closed"},
        ("closing/backend",),
    ),
    Flaw(
        "a graph's memory kept when it is closed",
        lambda: Twin(tape=broken.KeepsOutputs),
        {"closing/graphs": "a graph's outputs are alive after its backend was closed"},
        ("closing/runner/eager",),
    ),
    Flaw(
        "a rewrite that ignores another reader",
        lambda: Twin(rewrites=(broken.blind,)),
        {"rewrites/add_rms_norm/float32/another-reader": "with another reader of add"},
    ),
    Flaw(
        "a mutation not declared",
        kernel("rms_norm", lambda: broken.scratches_its_input),
        {"operations/rms_norm/float32/sample-1": "it changed the argument x, which `mutates` does not name"},
    ),
    Flaw(
        "a slot too many",
        kernel("store_kv_cache", lambda: broken.writes_a_slot_more),
        {"operations/store_kv_cache/float32/sample-1": "it wrote elements of key_cache that the reference"},
    ),
    Flaw(
        "NaN hidden",
        kernel("rms_norm", lambda: broken.hides_nan),
        {"operations/rms_norm/float32/nan": "result 0 is finite where the reference's is not"},
        ("operations/rms_norm/float32/sample-1",),
    ),
)


@cache
def twin(limits: hal.vendor.Limits | None) -> Conformance:
    return Conformance(backend="twin", open=partial(Twin, limits=limits))


@thorough(MODE, r"\[(a limit of streams|lengths not)")
@thorough(AGAIN, r"kept when it is closed")
@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: flaw.name)
def test_it_is_caught(flaw: Flaw) -> None:
    wrong = Conformance(backend="broken", open=flaw.open)
    right = twin(LIMITS.get(flaw.name))
    for name, message in flaw.fails.items():
        right.case(name).run()
        with pytest.raises((AssertionError, ValueError, CaptureError), match=message):
            wrong.case(name).run()
    for name in flaw.passes:
        wrong.case(name).run()
