"""The allocation of a prompt's pages: SGLang's own function for other devices, called as the kernel is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Kernel:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._allocate

    @staticmethod
    def _allocate(
        prefix_lens: Any,
        seq_lens: Any,
        last_loc: Any,
        free_pages: Any,
        out: Any,
        _rows: int,
        page_size: int,
        _most: int,
    ) -> None:
        from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

        alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, out.device)


alloc_extend_kernel = _Kernel()
