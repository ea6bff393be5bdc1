"""Compares SGLang's tokens on NPUs with a file's.

    python sglang_tokens.py CHECKPOINT FILE DTYPE RANKS engine|http [--graphs]

The file is what hal_tokens.py prints. `sglang.sh` calls both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from compare import compare

PORT = 30017
SIZES: dict[str, Any] = {
    "device": "npu",
    "attention_backend": "ascend",
    "context_length": 512,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "skip_server_warmup": True,
    "log_level": "warning",
}


def by_engine(arguments: dict[str, Any], prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of sglang.Engine."""
    import sglang

    engine = sglang.Engine(**arguments)
    found = engine.generate(input_ids=prompts, sampling_params=sampling)
    engine.shutdown()
    return [each["output_ids"] for each in found]


def by_http(arguments: dict[str, Any], prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of the server's /generate."""
    options = [f"--port={PORT}"]
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        given = [str(each) for each in value] if isinstance(value, list) else [] if value is True else [str(value)]
        options += [option, *given]
    server = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *options])
    try:
        address = f"http://127.0.0.1:{PORT}"
        while True:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with status {server.returncode}")
            try:
                urllib.request.urlopen(f"{address}/health", timeout=60)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(2)
        body = json.dumps({"input_ids": prompts, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{address}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=1200) as answer:
            return [each["output_ids"] for each in json.load(answer)]
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    """Generate, compare, and print a line."""
    checkpoint, file, dtype, ranks, way, *rest = sys.argv[1:]
    expected = json.loads(Path(file).read_text(encoding="utf-8"))
    graphs = {"cuda_graph_bs_decode": [1, 2, 4]} if rest else {"disable_cuda_graph": True}
    generate = {"engine": by_engine, "http": by_http}[way]
    sampling = [{"temperature": 0.0, "max_new_tokens": len(row), "ignore_eos": True} for row in expected["allowed"]]
    started = time.monotonic()
    arguments = {"model_path": checkpoint, "dtype": dtype, "tp_size": int(ranks), **SIZES, **graphs}
    found = generate(arguments, expected["prompts"], sampling)
    seconds = time.monotonic() - started
    compare(f"{way}, {'NPU graphs' if rest else 'eager'}", found, expected["allowed"], seconds)


if __name__ == "__main__":
    main()
