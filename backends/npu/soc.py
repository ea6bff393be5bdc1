"""The supported generations of Ascend NPUs, and their limits."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import torch

from hal.device.device import CACHE_DTYPES, Limits
from hal.errors import DriverUnavailable

BLOCK_SIZES = (128, 256, 384, 512)
"""Cache block sizes, in tokens, that attention accepts for both prefill and decode."""
HEAD_DIMS = tuple(range(16, 513, 16))
LEAST_GROUP = 32
"""The smallest antiquant_group_size, and what each is a multiple of."""
CAPTURE_SIZES = (1, 2, 4, 8, 12, *range(16, 65, 8))
ONE_MACHINE = (2, 4, 8)
"""Numbers of ranks on one machine that communicate all with all, over HCCS."""
DEVICE_STREAMS = 2048
RESERVED_STREAMS = 128
"""Left for torch_npu's pools, its update stream and communication; graphs may hold the others."""


@attrs.frozen
class Generation:
    """One generation of NPUs.

    Attributes:
        name: the common name.
        prefix: the prefix of its SoC names, as torch_npu reports them; a number follows.
        dtypes: the dtypes that attention supports.
        atb: whether ATB's operations are available.
        graphs: whether graphs can be captured.
        nz_cache: whether a kernel that writes a cache in FRACTAL_NZ is available.
        experts: whether the kernels for mixtures of experts are available in bfloat16.
        swiglu_quant_nz: whether npu_grouped_matmul_swiglu_quant_v2 takes weights in FRACTAL_NZ.
        weight_quant_nz: whether npu_weight_quant_batchmatmul takes int8 weights in FRACTAL_NZ.
        all_reduce_ranks: the numbers of ranks for which npu_mm_all_reduce_base is documented.
        row_collective_ranks: those for which npu_all_gather_base_mm and npu_mm_reduce_scatter_base are.
        distributes_experts: whether npu_moe_distribute_dispatch_v2 takes any number of ranks from 2 on.
        delta_rule: whether npu_recurrent_gated_delta_rule is available.
        requantized: the quantization schemes that ``quantized_weights`` ``auto`` converts to ``w8a8_dynamic``: float8,
            which the kernels widen. npu_quant_matmul takes a scale per token except on the 310P.
        expert_groups: the sizes of groups that npu_grouped_matmul takes for int4 weights alone; empty for any.
        int8_by_int4: whether npu_quant_matmul and npu_grouped_matmul take int4 weights with int8 activations.
        transposed_products: whether npu_transpose_batchmatmul is available.
        mrope: whether npu_mrope is available.
        latent_prompts: whether attention to latents takes more than 16 queries of a sequence.
        index_heads: the numbers of heads that npu_lightning_indexer takes; empty without sparse attention.
        wide_index_weights: whether it takes float32 weights.
        any_sparse_heads: whether npu_sparse_flash_attention takes other numbers of heads than powers of two.
        hyper_connections: whether npu_mhc_pre, npu_mhc_sinkhorn and npu_mhc_post are available.
    """

    name: str
    prefix: str
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    atb: bool = True
    graphs: bool = True
    nz_cache: bool = False
    experts: bool = True
    swiglu_quant_nz: bool = True
    weight_quant_nz: bool = False
    all_reduce_ranks: tuple[int, ...] = ()
    row_collective_ranks: tuple[int, ...] = ()
    distributes_experts: bool = False
    delta_rule: bool = False
    requantized: tuple[str, ...] = ("fp8", "fp8_dynamic", "fp8_static")
    expert_groups: tuple[int, ...] = ()
    int8_by_int4: bool = False
    transposed_products: bool = False
    mrope: bool = False
    latent_prompts: bool = False
    index_heads: Collection[int] = ()
    wide_index_weights: bool = False
    any_sparse_heads: bool = False
    hyper_connections: bool = False

    def limits(self, max_streams: int | None = None) -> Limits:
        """Return the limits of a backend on this generation."""
        return Limits(
            dtypes=self.dtypes,
            block_sizes=BLOCK_SIZES,
            head_dims=HEAD_DIMS,
            cache_dtypes=CACHE_DTYPES,
            requantized=self.requantized,
            group_multiple=LEAST_GROUP,
            max_streams=DEVICE_STREAMS - RESERVED_STREAMS if max_streams is None else max_streams,
            capture_sizes=CAPTURE_SIZES,
        )


GENERATIONS = (
    Generation(
        "A2",
        "Ascend910B",
        nz_cache=True,
        weight_quant_nz=True,
        all_reduce_ranks=ONE_MACHINE,
        row_collective_ranks=ONE_MACHINE,
        delta_rule=True,
        int8_by_int4=True,
        transposed_products=True,
        mrope=True,
        latent_prompts=True,
        index_heads=range(1, 65),
        wide_index_weights=True,
    ),
    Generation(
        "A3",
        "Ascend910_93",
        nz_cache=True,
        weight_quant_nz=True,
        row_collective_ranks=ONE_MACHINE,
        distributes_experts=True,
        delta_rule=True,
        int8_by_int4=True,
        transposed_products=True,
        mrope=True,
        latent_prompts=True,
        index_heads=range(1, 65),
        wide_index_weights=True,
    ),
    Generation("310P", "Ascend310P", dtypes=(torch.float16,), graphs=False, experts=False, requantized=()),
    Generation(
        "950",
        "Ascend950",
        atb=False,
        swiglu_quant_nz=False,
        expert_groups=(32, 64, 128, 256),
        index_heads=(8, 16, 24, 32, 64),
        any_sparse_heads=True,
        hyper_connections=True,
    ),
)


def generation_of(soc: str) -> Generation:
    """Return the generation of a SoC, such as Ascend910B3.

    Raises:
        DriverUnavailable: no supported generation matches the name.
    """
    for each in GENERATIONS:
        # The A2's SoCs carry a number. Ascend910B without one is an older chip.
        if soc.startswith(each.prefix) and any(map(str.isdigit, soc.removeprefix(each.prefix))):
            return each
    known = ", ".join(f"{each.prefix}* ({each.name})" for each in GENERATIONS)
    raise DriverUnavailable(f"the npu driver does not know the SoC {soc!r}", f"use one of {known}, or another backend")
