"""Variants of the CPU driver with one change each: faults that a comparison must find, and changes that it must accept.

A test installs it as the driver ``faulty``; its option ``fault`` selects the change.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from hal.backends.cpu.driver import CpuBackend, CpuDriver, CpuOptions
from hal.backends.cpu.tape import Tape
from safetensors.torch import load_file
from torch import Tensor

import hal
from hal import ops
from hal.config import read
from hal.errors import ConfigError
from hal.nn import WeightUse

REFERENCE = {name: operation.reference for name, operation in ops.catalogue().items()}


@attrs.frozen
class FaultyOptions:
    """The selected change; for a wrong epsilon, also the norm.

    Attributes:
        fault: the name of a method of :class:`FaultyBackend`, or "nothing".
        weights: a safetensors file.
        norm: the name in that file of the weight of the norm with the wrong epsilon.
        eps: the wrong epsilon.
    """

    fault: str = "nothing"
    weights: str = ""
    norm: str = ""
    eps: float = 1e-3


class FaultyBackend(CpuBackend):
    def __init__(self, options: FaultyOptions) -> None:
        super().__init__(CpuOptions(native=False, pack_weights=False))
        self.name, self.faulty, self.prepares, self.graph_of = "faulty", options, False, Tape
        changed: dict[str, Any] = getattr(self, options.fault)()
        self.kernels = {**self.kernels, **changed}  # type: ignore[assignment]

    def graph(self) -> hal.vendor.Graph:
        return self.graph_of(whole=self._whole)

    def counting_launches(self) -> Any:
        raise ConfigError("only other devices say how many kernels a step has", "use one", key="launches")

    def prepare_weights(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        return {**weights, "weight": -weights["weight"]} if self.prepares and "weight" in weights else weights

    def nothing(self) -> dict[str, Any]:
        return {}

    def epsilon(self) -> dict[str, Any]:
        wrong = load_file(self.faulty.weights)[self.faulty.norm]

        def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            if weight.shape == wrong.shape and torch.equal(weight, wrong.to(weight.dtype)):
                eps = self.faulty.eps
            return REFERENCE["rms_norm"](x, weight, eps)

        return {"rms_norm": rms_norm}

    def strides(self) -> dict[str, Any]:
        """Treats every tensor as contiguous."""

        def store_kv_cache(key: Tensor, value: Tensor, *rest: Tensor) -> None:
            dense = torch.empty(value.shape)
            REFERENCE["store_kv_cache"](key, value.as_strided(value.shape, dense.stride()), *rest)

        return {"store_kv_cache": store_kv_cache}

    def lengths(self) -> dict[str, Any]:
        """Reads one token too many."""

        def paged_attention(query: Tensor, *rest: Any) -> Tensor:
            caches_and_table, (starts, lens), host, (sinks, options) = rest[:3], rest[3:5], rest[5:7], rest[7:]
            more, options = (lens + 1, host[1] + 1), attrs.evolve(options, causal=False)
            return REFERENCE["paged_attention"](
                query, *caches_and_table, starts, more[0], host[0], more[1], sinks, options
            )

        return {"paged_attention": paged_attention}

    def between(self) -> dict[str, Any]:
        """Wrong while the model runs on the active backend, correct in separate calls."""

        def silu_and_mul(x: Tensor) -> Tensor:
            return REFERENCE["silu_and_mul"](x) * (1.01 if self.active else 1.0)

        return {"silu_and_mul": silu_and_mul}

    def narrow(self) -> dict[str, Any]:
        """Not a fault: computes only in float32, on blocks of 48."""
        self.limits = hal.vendor.Limits(dtypes=(torch.float32,), block_sizes=(48,))
        return {}

    def raises(self) -> dict[str, Any]:
        def silu_and_mul(x: Tensor) -> Tensor:
            raise ValueError("no such thing")

        return {"silu_and_mul": silu_and_mul}

    def nan(self) -> dict[str, Any]:
        return {"silu_and_mul": lambda x: REFERENCE["silu_and_mul"](x) * float("nan")}

    def hang(self) -> dict[str, Any]:
        """Never returns."""

        def silu_and_mul(x: Tensor) -> Tensor:
            time.sleep(10_000)
            return x

        return {"silu_and_mul": silu_and_mul}

    def memory(self) -> dict[str, Any]:
        def silu_and_mul(x: Tensor) -> Tensor:
            raise hal.errors.DeviceOutOfMemory("the device has no memory left", "give it less")

        return {"silu_and_mul": silu_and_mul}

    def crash(self) -> dict[str, Any]:
        """The rotary embedding returns a dtype that attention refuses."""
        return {"rotary_embedding": lambda query, key, *angles: (query.double(), key)}

    def shape(self) -> dict[str, Any]:
        """Duplicates half of the heads."""

        def rotary_embedding(query: Tensor, key: Tensor, *angles: Tensor) -> tuple[Tensor, Tensor]:
            query, key = REFERENCE["rotary_embedding"](query, key, *angles)
            return torch.cat((query, query), 1), key

        def paged_attention(query: Tensor, *rest: Any) -> Tensor:
            return REFERENCE["paged_attention"](query[:, : query.shape[1] // 2], *rest)

        return {"rotary_embedding": rotary_embedding, "paged_attention": paged_attention}

    def truncating(self) -> dict[str, Any]:
        """Converts to int8 without rounding."""

        def quantize(x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
            scaled = x.float() / scale + (0 if offset is None else offset)
            return scaled.trunc().clamp(-128, 127).to(torch.int8)

        return {"quantize": quantize}

    def prepared(self) -> dict[str, Any]:
        """Not a fault: weights in another form, and a cache in another layout."""
        self.prepares, self.state_layout = True, "backwards"

        def linear(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
            return REFERENCE["linear"](x, -weight, *others)

        def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
            last = key_cache.shape[0] * key_cache.shape[1] - 1
            REFERENCE["store_kv_cache"](key, value, key_cache, value_cache, last - slots)

        def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any) -> Tensor:
            keys, values = (cache.flatten(0, 1).flip(0).view(cache.shape) for cache in (key_cache, value_cache))
            return REFERENCE["paged_attention"](query, keys, values, *rest)

        return {"linear": linear, "store_kv_cache": store_kv_cache, "paged_attention": paged_attention}

    def sums(self) -> dict[str, Any]:
        """Wrong only between ranks: the fifth sum of a step, after the MLP of the second layer."""
        counts, right = itertools.count(), self.kernels["all_reduce"]

        def all_reduce(x: Tensor, group: str) -> Tensor:
            summed: Tensor = right(x, group)
            return summed * 1.01 if next(counts) % 9 == 4 else summed

        return {"all_reduce": all_reduce}

    def slices(self) -> dict[str, Any]:
        """Wrong only on rank 1 of several."""

        def silu_and_mul(x: Tensor) -> Tensor:
            return REFERENCE["silu_and_mul"](x) * (1.01 if self.mesh.tensor.rank == 1 else 1.0)

        return {"silu_and_mul": silu_and_mul}

    def stale(self) -> dict[str, Any]:
        """Wrong only in graphs: a replay reads the captured lengths."""

        class StaleTape(Tape):
            def _launch(self, host_values: Mapping[str, Tensor]) -> None:
                super()._launch({})

        self.graph_of = StaleTape
        return {}


class FaultyDriver(CpuDriver):
    name = "faulty"
    priority = -1

    def open(self, options: Mapping[str, Any]) -> FaultyBackend:  # type: ignore[override]
        return FaultyBackend(read(FaultyOptions, options, "options of the faulty driver"))
