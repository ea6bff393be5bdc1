"""Hooks of SGLang's functions, in its own registry: which devices it sees, and which requests it takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

QUERIES = ("is_cuda", "is_hip", "is_hpu", "is_mps", "is_musa", "is_npu", "is_sail", "is_xpu")
"""SGLang's questions for an accelerator, by which its modules choose their kernels when they are imported."""

_COMMON = "sglang.srt.utils.common"
_TOKENIZED = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"


class Hooks(MetaPathFinder):
    """Registers the hooks at the first import after SGLang's queries exist. It finds no module itself.

    SGLang loads its platforms while it imports the module of the queries, so that none of them exists yet; it applies
    the hooks of its plugins when other modules have already asked.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """Register the hooks if it is time to, and find nothing."""
        if not all(hasattr(sys.modules.get(_COMMON), name) for name in QUERIES):
            return
        sys.meta_path = [each for each in sys.meta_path if each is not self]  # Python iterates over the former list.
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from hal.engines.sglang.requests import check_request

        for name in QUERIES:
            HookRegistry.register(f"{_COMMON}.{name}", _no, HookType.REPLACE)
        HookRegistry.apply_hooks()
        HookRegistry.register(_TOKENIZED, check_request, HookType.AFTER)  # SGLang applies it.


def _no() -> bool:
    """Return that SGLang sees no accelerator: hal owns them."""
    return False
