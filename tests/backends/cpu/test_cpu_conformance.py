"""The conformance suite with the CPU driver."""

from __future__ import annotations

from helpers.thorough import DTYPE, EXHAUSTIVE, FAMILY, LONG, MODE, OPERATION, PROCESSES, thorough

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

pytestmark = [
    thorough(DTYPE, r"/(bfloat16|float16)(/|\])"),
    thorough(MODE, r"\[closing/runner/(graph|piecewise\w*|inductor)\]"),
    thorough(MODE, r"\[closing/(others|while-running/(eager|piecewise\w*))\]"),
    thorough(MODE, r"\[leaks/steps/(?!graph)|\[models/qwen3/inductor/float32"),
    thorough(MODE, r"\[runners/(inductor/|piecewise_eager/(?!mixed))"),
    thorough(OPERATION, r"\[rewrites/(?!add_rms_norm/)\w+/.*another-reader"),
    thorough(LONG, r"\[rewrites/expert_mlp/proof"),
    thorough(PROCESSES, r"\[ranks/"),
    thorough(FAMILY, r"\[models/(?!qwen3/)\w+/(graph|piecewise|inductor)/"),
    thorough(EXHAUSTIVE, r"\[models/qwen3/(graph|piecewise\w*)/float16"),
    thorough(EXHAUSTIVE, r"\[models/llama/((graph|piecewise_eager)/bfloat16|(eager|piecewise)/float16)"),
    thorough(EXHAUSTIVE, r"\[models/qwen3_moe/((eager|graph)/float16|piecewise\w*/bfloat16)"),
    thorough(EXHAUSTIVE, r"\[runners/inductor/(queries|padding|shared-queries-[24])"),
    thorough(EXHAUSTIVE, r"\[runners/(piecewise/(queries-[48]|shared-queries-4)|piecewise_eager/\S*queries-[48])"),
]

conformance = Conformance(backend="cpu")
