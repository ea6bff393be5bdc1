"""The generations of Ascend NPUs that the driver knows, and what each takes."""

from __future__ import annotations

import attrs
import torch

from hal.device.limits import Limits
from hal.errors import DriverUnavailable

BLOCK_SIZES = (128, 256, 384, 512)
"""Tokens per block of a cache that attention takes for prefill and decode alike."""
HEAD_DIMS = tuple(range(16, 513, 16))
CAPTURE_SIZES = (1, 2, 4, 8, 12, *range(16, 65, 8))
RESERVED_STREAMS = 128
"""Of the device's 2,048: torch_npu's pools, its update stream and communication take some."""


@attrs.frozen
class Generation:
    """What the NPUs of one generation have in common.

    Attributes:
        name: as people call it.
        prefix: how the names of its SoCs begin, as torch_npu reports them; a number follows.
        dtypes: that attention computes in.
        atb: whether ATB's operations run on it.
        graphs: whether it captures graphs.
        nz_cache: whether it has the kernel that writes a cache in FRACTAL_NZ.
    """

    name: str
    prefix: str
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    atb: bool = True
    graphs: bool = True
    nz_cache: bool = False

    def limits(self, max_streams: int | None = None) -> Limits:
        """What a backend on it can take."""
        return Limits(
            dtypes=self.dtypes,
            block_sizes=BLOCK_SIZES,
            head_dims=HEAD_DIMS,
            max_streams=2048 - RESERVED_STREAMS if max_streams is None else max_streams,
            capture_sizes=CAPTURE_SIZES,
        )


GENERATIONS = (
    Generation("A2", "Ascend910B", nz_cache=True),
    Generation("A3", "Ascend910_93", nz_cache=True),
    Generation("310P", "Ascend310P", dtypes=(torch.float16,), graphs=False),
    Generation("950", "Ascend950", atb=False),
)


def generation_of(soc: str) -> Generation:
    """The generation of a SoC by its name, such as Ascend910B3.

    Raises:
        DriverUnavailable: it is none that the driver knows.
    """
    for each in GENERATIONS:
        # Ascend910B by itself is older than the A2, whose SoCs are numbered.
        if soc.startswith(each.prefix) and any(map(str.isdigit, soc.removeprefix(each.prefix))):
            return each
    known = ", ".join(f"{each.prefix}* ({each.name})" for each in GENERATIONS)
    raise DriverUnavailable(f"the npu driver does not know the SoC {soc!r}", f"it knows {known}; use another backend")
