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
    # Each sample of more than five, each special value and each rewrite runs in float32 and in one type of 16 bits.
    thorough(EXHAUSTIVE, r"\[operations/\w+/float16/sample-([579]|\d*[1-9][13579])\]"),
    thorough(EXHAUSTIVE, r"\[operations/\w+/bfloat16/sample-([68]|\d*[1-9][02468])\]"),
    thorough(EXHAUSTIVE, r"\[operations/\w+/float16/(.*, )?(nan|infinity)\]"),
    thorough(EXHAUSTIVE, r"\[operations/\w+/bfloat16/(.*, )?(large|rows-\w+)\]"),
    thorough(EXHAUSTIVE, r"\[rewrites/\w+/(bfloat16/another-reader|float16/alone)"),
    thorough(EXHAUSTIVE, r"\[ranks/(layers/\S+/float16|skipped-collective)"),
    # tests/compile/test_rewrites.py proves these as well.
    thorough(EXHAUSTIVE, r"\[rewrites/(multi_head_latent_attention|add_rms_norm)/proof"),
    # tests/models compiles these families as well, in test_llama.py and test_experts.py.
    thorough(EXHAUSTIVE, r"\[models/(llama|qwen3_moe)/inductor"),
    thorough(EXHAUSTIVE, r"\[models/qwen3/(graph|piecewise\w*)/float16"),
    thorough(EXHAUSTIVE, r"\[models/llama/((graph|piecewise\w*)/bfloat16|(eager|piecewise)/float16)"),
    thorough(EXHAUSTIVE, r"\[models/qwen3_moe/(eager/float16|piecewise/bfloat16|(graph|piecewise_eager)/b?float16)"),
    thorough(EXHAUSTIVE, r"\[runners/inductor/(queries|padding|shared-queries-[24]|block-edges|second-block|order)"),
    thorough(EXHAUSTIVE, r"\[runners/piecewise/(queries-[48]|shared-queries-4|order|second-block)"),
    thorough(EXHAUSTIVE, r"\[runners/piecewise_eager/(\S*queries-[48]|padding|block-edges)"),
]

conformance = Conformance(backend="cpu")
