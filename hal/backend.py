"""A backend: an opened driver. It holds what models run on: a device, kernels, limits, graphs, caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.backend_checks import check_cache_layout, check_layers, check_names, check_rewrites
from hal.backend_ops import BackendOps, StandIns
from hal.compilers import (
    IN_PIECES,
    OWN_COMPILERS,
    SPLITTING_OPS,
    all_compilers,
    by_own_names,
    check_aliases,
    check_compilation,
    pass_name,
)
from hal.config import CompilationConfig, Config, load
from hal.device import Device
from hal.errors import (
    ConfigError,
    DeviceError,
    DeviceOutOfMemory,
    HalError,
    nearest,
)
from hal.graph import Graph
from hal.kv_cache import KVCache, KVCacheSpec, canonical_kv_cache
from hal.limits import DEFAULT_BLOCK_SIZE, Limits
from hal.ops.calling import check_kernel
from hal.ops.declaration import Kernel, Operation

LayerMaker = Callable[[Any], nn.Module]
"""From a layer without values to the one in its place, or to the layer itself where that stays."""


class Backend:
    """An opened driver. Drivers make one, or a subclass with ``graph`` and ``kv_cache`` of their own.

    Args:
        name: the driver's name.
        device: the device it runs on.
        kernels: by operation name, a callable with the operation's arguments. An operation without one runs its body.
        compilers: the names that ``compilation.compiler`` may take here; ``eager`` is always one.
        aliases: other names that a configuration may call compilers by here, and hal's.
        rewrites: graph rewrites of the driver's own, which run before those of the fused operations. One with a fused
            operation's name takes the place of that operation's, for instance to say when it does not apply.
        layers: by class of ``hal.nn``, what makes the layer that models get in its place: a subclass of it whose
            constructor takes the original, or a function. Drivers whose hardware has a kernel need none.
        native_names: the vendor's own names of operations, such as ``atb._npu_paged_attention``, and hal's.
        capabilities: names of optional abilities.
        limits: see :class:`Limits`.
        inductor: names of the operations whose kernels the code that Inductor makes calls, so that it compiles the
            others from their bodies; None if the compiler ``inductor`` does not serve this backend.
        cache_layout: ``canonical``, or a name of the driver's own, whose ``kv_cache`` then makes such caches. Only its
            own kernels can read them.
        sources: by operation, the library that its kernel is from, for drivers that choose among several.

    Raises:
        OperationError: a kernel is for no known operation, or cannot be called as its operation is.
        DriverIncompatible: the cache layout is not canonical, and an operation that touches the cache has no kernel;
            a text stands where names are wanted; a rewrite is none, or has another's name; an alias is a compiler's own
            name, or stands for none; or a layer is none of hal.nn's that can be replaced.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        *,
        kernels: Mapping[str, Kernel],
        compilers: Sequence[str] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
        rewrites: Sequence[Any] = (),
        layers: Mapping[type[nn.Module], LayerMaker] = MappingProxyType({}),
        native_names: Mapping[str, str] = MappingProxyType({}),
        capabilities: frozenset[str] = frozenset(),
        limits: Limits | None = None,
        inductor: Collection[str] | None = None,
        cache_layout: str = "canonical",
        sources: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        for each, kernel in kernels.items():
            check_kernel(name, ops.operation(each), kernel)  # a misspelt name would otherwise never run
        check_cache_layout(name, cache_layout, kernels)
        check_names(name, compilers=compilers, capabilities=capabilities, inductor=inductor or ())
        check_rewrites(name, rewrites)
        check_layers(name, layers)
        self.name = name
        self.device = device
        self.kernels = MappingProxyType(dict(kernels))
        self.compilers = all_compilers(compilers, inductor=inductor is not None)
        self.inductor = None if inductor is None else frozenset(ops.operation(each).name for each in inductor)
        self.aliases = MappingProxyType(dict(aliases))
        check_aliases(name, aliases, self.compilers)
        self.rewrites = tuple(rewrites)
        self.layers = MappingProxyType(dict(layers))
        self.native_names = MappingProxyType(dict(native_names))
        self.capabilities = frozenset(capabilities)
        self.limits = limits or Limits()
        self.cache_layout = cache_layout
        self.sources = MappingProxyType(dict(sources))
        self.config = Config(backend=name)
        self._stand_in = StandIns(self)
        self.ops = BackendOps(self, self._stand_in)
        self.graphs: WeakSet[Graph] = WeakSet()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {self.device!r}>"

    @property
    def active(self) -> bool:
        """Whether ``hal.ops`` goes to this backend."""
        return _active is self

    @property
    def streams_in_graphs(self) -> int:
        """Streams that the captured graphs of this backend's runners hold."""
        return len(self.graphs) * self.limits.streams_per_graph

    @property
    def block_size(self) -> int:
        """Tokens per block of a cache: the config's, or else the one that the backend prefers."""
        preferred = self.limits.block_sizes
        return self.config.cache.block_size or (preferred[0] if preferred else DEFAULT_BLOCK_SIZE)

    def activate(self) -> None:
        """Make ``hal.ops`` go to this backend, process-wide, from the next call on."""
        global _active
        ops.activate(self.resolve)
        _active = self

    def resolve(self, operation: Operation) -> Kernel:
        """What ``hal.ops`` runs for ``operation`` while this backend is active."""
        return self.kernels.get(operation.name) or self._stand_in(operation, operation.body)

    def configure(self, config: Config) -> None:
        """Take over the configuration it was opened with; refuse what this backend cannot do.

        Raises:
            ConfigError: a value is of a wrong type, or a compiler, dtype or block size that the backend does not have.
        """
        config = load(config)
        config = attrs.evolve(config, compilation=by_own_names(config.compilation, self.aliases))
        check_compilation(self, config.compilation)
        self._check_brought(config.compilation)
        if config.dtype != "auto":
            self.check_dtype(getattr(torch, config.dtype))
        size, sizes = config.cache.block_size, self.limits.block_sizes
        if size is not None and sizes and size not in sizes:
            raise ConfigError(
                f"cache.block_size {size} does not suit the backend {self.name}",
                f"use one of {', '.join(map(str, sizes))}",
            )
        self.config = config
        if self.active:
            self.activate()  # what stands in for missing kernels depends on the config

    def _check_brought(self, config: CompilationConfig) -> None:
        compilers = {config.of("decode").compiler, config.of("prefill").compiler}
        if compilers & {"graph", *IN_PIECES} and type(self).graph is Backend.graph:
            raise self._without_graphs()
        for own in compilers - set(OWN_COMPILERS):
            if type(self).decoder is Backend.decoder:
                raise self._without_decoder(own)

    def _without_graphs(self) -> ConfigError:
        return ConfigError(f"the backend {self.name} has no graphs", 'use the compiler "eager"')

    def _without_decoder(self, compiler: str) -> ConfigError:
        return ConfigError(
            f"the driver {self.name} names the compiler {compiler!r} and does not bring it", "report it to its authors"
        )

    def splitting_ops(self, config: CompilationConfig) -> set[str]:
        """hal's names of the operations that a phase is split at."""
        return {self.operation_named(name) for name in config.splitting_ops or SPLITTING_OPS}

    @property
    def pass_names(self) -> tuple[str, ...]:
        """The names that ``compilation.passes`` may hold: of the driver's own rewrites, and of the fused operations."""
        fused = [each.name for each in ops.catalogue().values() if each.fused and each.name in self.kernels]
        return tuple(dict.fromkeys((*map(pass_name, self.rewrites), *fused)))

    def operation_named(self, name: str) -> str:
        """hal's name of an operation, by that or by the vendor's.

        Raises:
            ConfigError: there is no such operation.
        """
        known = {**self.native_names, **{each: each for each in ops.catalogue()}}
        if name not in known:
            raise ConfigError(f"splitting_ops has {name!r}, which is no operation", nearest(name, known))
        return known[name]

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ConfigError unless the backend computes in ``dtype``."""
        if dtype not in self.limits.dtypes:
            raise ConfigError(
                f"the backend {self.name} does not compute in {dtype}",
                f"set dtype to one of {', '.join(str(known).removeprefix('torch.') for known in self.limits.dtypes)}",
            )

    def graph(self) -> Graph:
        """A new, empty graph.

        Raises:
            ConfigError: the driver brings no graphs.
        """
        raise self._without_graphs()

    def decoder(self, compiler: str, model: Any, cache: KVCache) -> Callable[[Any], Tensor]:
        """What runs decode steps with a compiler of the driver's own.

        Args:
            compiler: one of ``compilers`` that hal itself does not know.
            model: a :class:`hal.nn.CausalLM`, loaded on this backend.
            cache: that it writes.

        Returns:
            A function from a :class:`hal.Batch` to logits ``[sequences, vocab_size]``, valid until the next call. If it
            has a method ``stages``, from a batch size to ``hal.compile.optimise.Stage`` objects, ``hal explain``
            shows what came after the rewrites.

        Raises:
            ConfigError: the driver has none.
        """
        raise self._without_decoder(compiler)

    def prepare_weight(self, weight: Tensor, *, shared: bool) -> Tensor:
        """Bring a projection's weight into the form that this backend's ``linear`` computes on; called once, at load.

        Args:
            weight: ``[out_features, in_features]``, on the backend's device.
            shared: whether the weight is an embedding's table too, and stays as it is beside what is returned.

        Returns:
            What ``linear`` gets as its weight: ``weight`` itself by default, else a tensor of the same shape and dtype,
            in whichever layout.
        """
        return weight

    def plain_weight(self, weight: Tensor) -> Tensor:
        """What :meth:`prepare_weight` made, as torch copies it to other devices and saves it.

        Args:
            weight: a projection's, or any other tensor of a model that was loaded on this backend.

        Returns:
            ``weight`` itself by default, which will do for a layout that torch brings out of by copying; else a tensor
            of the same shape and dtype, in an ordinary layout.
        """
        return weight

    def prepare_deq_scale(self, deq_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Bring the scales of a static W8A8 projection into the form that ``quant_linear_static`` takes for ``dtype``.

        Called once, at load.

        Args:
            deq_scale: ``[out_features]``, float32, on the backend's device.
            dtype: of the projection's result.

        Returns:
            ``deq_scale`` itself by default, else a tensor of its shape, of another dtype.
        """
        return deq_scale

    def kv_cache(self, spec: KVCacheSpec) -> KVCache:
        """Memory for ``spec``, in a layout of the backend's choosing; by default the canonical one."""
        return canonical_kv_cache(spec, self.device.torch)

    def explain(self, error: BaseException) -> HalError | None:
        """The typed error for an exception that PyTorch or the vendor's package raised, or None if it is not known.

        Runners ask here, so that callers meet :class:`~hal.errors.DeviceError`, whatever the vendor raises. By default
        it knows torch's own exceptions for devices.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return DeviceOutOfMemory(f"the device has no memory left: {error}", DeviceOutOfMemory.REMEDY)
        if isinstance(error, torch.AcceleratorError):
            return DeviceError(f"the device failed: {error}", "run the step again; restart the process if it repeats")
        return None

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Inside the block, exceptions that :meth:`explain` knows are raised as what it says.

        Put reads of a step's results into it: what fails on the device is reported where the host waits.
        """
        try:
            yield
        except HalError:
            raise
        except Exception as error:
            known = self.explain(error)
            if known is None:
                raise
            raise known from error

    def counting_launches(self) -> AbstractContextManager[Counter[str]]:
        """A context whose counter has, behind the block, how often each kernel was launched on the device in it.

        Raises:
            ConfigError: the backend cannot tell.
        """
        raise ConfigError(
            f"the backend {self.name} does not count launches", "use one that does, such as an emulated device"
        )


_active: Backend | None = None


def active_backend() -> Backend | None:
    """The backend that ``hal.ops`` goes to, or None before one is opened."""
    return _active
