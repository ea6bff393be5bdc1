"""Runs ``hal bench`` with llama.cpp as another contender.

    python -m tools.llama decode --shapes qwen3-0.6b --against llama.cpp

Run it from the repository's root. It needs the extra ``gguf``, and ``pip install llama-cpp-python``. The arguments are
those of ``hal bench``.
"""

from __future__ import annotations

import sys

from hal.bench import measurement, plan
from hal.cli import main

from .llama_side import MODULE, NAME, LlamaSide

if __name__ == "__main__":  # It is imported again in the process of llama.cpp.
    plan.RIVALS[NAME] = MODULE, None
    measurement.SIDES[NAME] = LlamaSide
    main(["bench", *sys.argv[1:]])
