"""Declares two operators of torchvision, so that its build for CUDA can be imported beside the CPU build of torch.

That build cannot load its kernels then, and registers fakes of these two operators all the same. SGLang and
transformers' processors of videos import torchvision, and hal uses none of its operators. Where no CPU build of
torchvision can be had, `make test-sglang` and `make test-vllm` copy this file into their environments, with a .pth file
that imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

DECLARED: list[object] = []
"""The library of the declarations, which last as long as it does."""


class Declaring(MetaPathFinder):
    """Declares the operators when torchvision looks for its kernels."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing."""
        if fullname != "torchvision.extension":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            DECLARED.append(library)


sys.meta_path.insert(0, Declaring())
