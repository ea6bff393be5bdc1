"""The conformance suite with the NPU driver, on the emulated CANN."""

from __future__ import annotations

from helpers.thorough import DTYPE, EXHAUSTIVE, FAMILY, MODE, OPERATION, PROCESSES, thorough

from hal.testing import Conformance
from hal.testing.suite import *  # noqa: F403

pytestmark = [
    thorough(DTYPE, r"/float16(/|\])"),
    thorough(MODE, r"\[closing/runner/(piecewise\w*|npugraph_ex)\]"),
    thorough(MODE, r"\[runners/(piecewise\w*|npugraph_ex)/(shared-)?queries-[48]"),
    thorough(MODE, r"\[closing/(others|while-running/(eager|piecewise\w*|npugraph_ex))\]"),
    thorough(MODE, r"\[runners/(piecewise|npugraph_ex)/(padding|queries-2)"),
    thorough(MODE, r"\[runners/(npugraph_ex|piecewise_eager)/(?!mixed)"),
    thorough(PROCESSES, r"\[ranks/"),
    thorough(OPERATION, r"\[rewrites/(?!add_rms_norm/)\w+/(proof|.*another-reader)"),
    thorough(FAMILY, r"\[models/(?!qwen3/)\w+/(graph|piecewise\w*|npugraph_ex)/"),
    thorough(EXHAUSTIVE, r"\[models/qwen3/(graph|piecewise\w*)/float16"),
    thorough(EXHAUSTIVE, r"\[models/llama/((graph|piecewise_eager)/bfloat16|(eager|piecewise|npugraph_ex)/float16)"),
    thorough(
        EXHAUSTIVE, r"\[models/qwen3_moe/((eager|graph|piecewise_eager)/float16|(piecewise|npugraph_ex)/bfloat16)"
    ),
    thorough(
        EXHAUSTIVE, r"\[runners/(npugraph_ex/(queries-[48]|shared-queries-8)|piecewise/(queries-[48]|shared-queries-4))"
    ),
    thorough(EXHAUSTIVE, r"\[runners/piecewise_eager/\S*queries-[48]"),
    thorough(EXHAUSTIVE, r"\[ranks/skipped-collective"),
    # Of a mode, the cases that need its own code stay; lengths, blocks and dtypes are the same in all modes.
    thorough(EXHAUSTIVE, r"\[runners/(npugraph_ex|piecewise_eager)/(block-edges|second-block|order|shared-)"),
    thorough(EXHAUSTIVE, r"\[models/(llama/(npugraph_ex|piecewise)/|qwen3/(eager|npugraph_ex)/float16)"),
    thorough(EXHAUSTIVE, r"\[limits/head_dims/(96|112|144|160|176|208|224|240|272|[34]\d\d)/"),
]

conformance = Conformance(backend="npu", ranks={"options": {"emulator": "on"}})
