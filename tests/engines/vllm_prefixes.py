"""Runs random requests through vLLM instances that leave prefixes for others in a folder, and reports their tokens.

The argument is JSON with ``checkpoint``, ``instances`` (``kv_role`` and backend of each, in order), ``folder``, ``hal``
(hal's configuration), ``dtype``, ``blocks`` (of the cache), ``longest`` (prompt), ``seed``, ``requests``, and ``out``,
the file for the result. test_vllm_prefixes.py runs it in another process.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm_counts import resumed
from vllm_requests import agree

from hal.engines.vllm.worker import HalWorker


class CountingWorker(HalWorker):
    """Counts preempted requests."""

    resumed = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        """Count, and run the step."""
        self.resumed += resumed(scheduler_output)
        return super().execute_model(scheduler_output)

    def counted(self) -> dict[str, int]:
        """Return what was moved."""
        runner, mover = self.model_runner, self.model_runner.mover
        return {
            "read": mover.read,
            "written": mover.written,
            "bytes of a token": runner.runner.spec.token_bytes,
            "resumed": self.resumed,
        }


def main() -> None:
    """Run the instances one after the other."""
    asked = json.loads(sys.argv[1])
    draw = random.Random(asked["seed"])
    config = json.loads((Path(asked["checkpoint"]) / "config.json").read_text(encoding="utf-8"))
    lengths = [draw.choice((draw.randint(1, 40), draw.randint(1, asked["longest"]))) for _ in range(asked["requests"])]
    prompts = [[draw.randrange(5, config["vocab_size"]) for _ in range(length)] for length in lengths]
    params = [
        SamplingParams(temperature=0.0, max_tokens=draw.choice((1, 8, 48)), ignore_eos=True, detokenize=False)
        for _ in prompts
    ]
    given: Any = [{"prompt_token_ids": each} for each in prompts]
    found = []
    for role, backend in asked["instances"]:
        engine = LLM(
            model=asked["checkpoint"],
            max_model_len=asked["longest"] + 56,
            dtype=asked["dtype"],
            skip_tokenizer_init=True,
            worker_cls=f"{__name__}.{CountingWorker.__name__}",
            additional_config={"hal": {**asked["hal"], "backend": backend}},
            max_num_seqs=8,
            max_num_batched_tokens=96,
            num_gpu_blocks_override=asked["blocks"],
            kv_transfer_config={
                "kv_connector": "HalConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"folder": asked["folder"]},
            },
        )
        tokens = [[*each.outputs[0].token_ids] for each in engine.generate(given, params, use_tqdm=False)]
        (counts,) = engine.collective_rpc("counted")
        found.append({"tokens": tokens, **counts})
    first, *others = (each["tokens"] for each in found)
    differ = [
        index
        for other in others
        for index, (prompt, *pair) in enumerate(zip(prompts, first, other, strict=True))
        if not agree(asked["checkpoint"], prompt, *pair)
    ]
    result = {"found": found, "prompts": lengths, "differ": differ}
    Path(asked["out"]).write_text(json.dumps(result), encoding="utf-8")
