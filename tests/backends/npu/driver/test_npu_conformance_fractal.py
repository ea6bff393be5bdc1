"""The conformance suite with the NPU driver, with weights and cache in the FRACTAL_NZ layout."""

from __future__ import annotations

from helpers.thorough import DTYPE, EXHAUSTIVE, FAMILY, MODE, thorough

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

pytestmark = [
    thorough(DTYPE, r"/float16(/|\])"),
    thorough(MODE, r"\[(graphs|leaks|rewrites|runners)/"),
    thorough(MODE, r"\[(limits/|models/qwen3/piecewise)"),
    thorough(FAMILY, r"\[models/(?!qwen3/)\w+/(graph|piecewise\w*|npugraph_ex)/"),
    thorough(EXHAUSTIVE, r"\[models/qwen3/\w+/float16"),
    thorough(EXHAUSTIVE, r"\[models/qwen3_moe/(eager/float16|graph/float16|piecewise\w*/|npugraph_ex/bfloat16)"),
    thorough(EXHAUSTIVE, r"\[rewrites/\w+/proof"),
    thorough(EXHAUSTIVE, r"\[runners/((eager|piecewise\w*|npugraph_ex)/(?!mixed)|graph/\S*queries-[48])"),
    # test_npu_conformance.py has each family in these modes; the layout is the same for all of them.
    thorough(EXHAUSTIVE, r"\[models/(llama/|qwen3/piecewise|qwen3_moe/(eager|graph)/bfloat16)"),
]

conformance = Conformance(
    backend="npu",
    config={"options": {"nz_cache": True, "nz_weights": True}},
    # The areas that a layout can affect. test_npu_conformance.py has all areas.
    only=(
        "operations/*linear*",
        "operations/*cache*",
        "operations/*attention*",
        "rewrites/*",
        "graphs/*",
        "runners/*",
        "models/*",
        "limits/*",
        "leaks/steps/*",
    ),
)
