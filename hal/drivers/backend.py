"""A backend: an opened driver. It holds what models run on: a device, kernels, limits, graphs, caches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.config import CompilationConfig, Config, load
from hal.device.device import Device
from hal.device.limits import DEFAULT_BLOCK_SIZE, Limits
from hal.drivers.backend_checks import (
    check_arguments,
    check_block_size,
    check_layers,
    check_rewrites,
    check_state_layout,
)
from hal.drivers.backend_operations import BackendOps, StandIns, refusing
from hal.drivers.backend_resources import BackendResources
from hal.drivers.compiler import Compiler
from hal.drivers.compiler_registry import (
    EAGER,
    SPLITTING_OPS,
    by_own_names,
    check_aliases,
    check_compilation,
    check_compilers,
    compilers_of,
    pass_name,
)
from hal.errors import ConfigError, DriverIncompatible, nearest
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.call_signature import check_kernel
from hal.ops.kernels.kernel_table import Kernel, Table, enter, leave

if TYPE_CHECKING:
    from hal.nn.weight import WeightUse

LayerMaker = Callable[[Any], nn.Module]
"""From a layer without values to the one in its place, or to the layer itself where that stays."""


class Backend(BackendResources):
    """An opened driver. Drivers make one, or a subclass with ``graph`` and ``allocate`` of their own.

    A context manager: at the end of the block it is closed. :meth:`close` frees all graphs, streams, caches and
    workspaces of the backend and of its runners at once; weights stay with the model, whoever holds that. From then on
    the backend, its runners, its graphs and ``backend.ops`` raise ClosedError. If it was the active backend, none is
    active afterwards, and ``hal.ops`` raises ClosedError until another is. Other backends go on as they are.

    Args:
        name: the driver's name.
        device: the device it runs on.
        kernels: by operation name, a callable with the operation's arguments. An operation without one runs its body.
        graphs: whether :meth:`graph` captures, so that hal's compilers that capture serve it.
        compilers: of the driver's own. Those that are registered, hal's among them, need no mention.
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
        state_layout: ``canonical``, or a name of the driver's own, whose ``allocate`` then makes states of that layout.
            Only its own kernels can read them.
        sources: by operation, the library that its kernel is from, for drivers that choose among several.

    Raises:
        OperationError: a kernel is for no known operation, or cannot be called as its operation is.
        DriverIncompatible: an argument is of another type than it must be; the layout of states is not canonical, and
            an operation on such a state has no kernel; a compiler or rewrite is none, or has another's name; a rewrite
            does not declare the axes and dtypes of a tensor; an alias is a compiler's own name, or stands for none; or
            a layer is none of hal.nn's that can be replaced.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        *,
        kernels: Mapping[str, Kernel],
        graphs: bool = False,
        compilers: Sequence[Compiler] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
        rewrites: Sequence[Any] = (),
        layers: Mapping[type[nn.Module], LayerMaker] = MappingProxyType({}),
        native_names: Mapping[str, str] = MappingProxyType({}),
        capabilities: frozenset[str] = frozenset(),
        limits: Limits | None = None,
        inductor: Collection[str] | None = None,
        state_layout: str = "canonical",
        sources: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        check_arguments(
            name,
            {
                "name": name, "device": device, "kernels": kernels, "graphs": graphs, "compilers": compilers,
                "aliases": aliases, "rewrites": rewrites, "layers": layers, "native_names": native_names,
                "capabilities": capabilities, "limits": limits, "inductor": inductor, "state_layout": state_layout,
                "sources": sources,
            },
        )  # fmt: skip
        for each, kernel in kernels.items():
            check_kernel(name, ops.operation(each), kernel)  # a misspelt name would otherwise never run
        check_state_layout(name, state_layout, kernels)
        check_compilers(name, compilers)
        check_rewrites(name, rewrites)
        check_layers(name, layers)
        super().__init__(name, device)
        self.kernels = MappingProxyType(dict(kernels))
        self.graphs = graphs
        self.inductor = None if inductor is None else frozenset(ops.operation(each).name for each in inductor)
        self._compilers = compilers_of(self, compilers)
        self.compilers = (EAGER, *self._compilers)
        self.aliases = MappingProxyType(dict(aliases))
        check_aliases(name, aliases, self.compilers)
        if graphs and type(self).graph is Backend.graph:
            raise DriverIncompatible(
                f"the driver {name} says that it has graphs, and does not bring them", "override Backend.graph"
            )
        self.rewrites = tuple(rewrites)
        self.layers = MappingProxyType(dict(layers))
        self.native_names = MappingProxyType(dict(native_names))
        self.capabilities = frozenset(capabilities)
        self.limits = Limits() if limits is None else limits
        self.state_layout = state_layout
        self.sources = MappingProxyType(dict(sources))
        self.config = Config(backend=name)
        self._stand_in = StandIns(name, lambda: self.config.strict)
        self.table = Table(self.resolve)
        self.ops = BackendOps(self.uses, self.enter, self.leave)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {self.device!r}>"

    @property
    def active(self) -> bool:
        """Whether ``hal.ops`` goes to this backend."""
        return _active is self

    @property
    def streams_in_graphs(self) -> int:
        """Streams that the captured graphs of this backend's runners hold."""
        return len(self.captured_graphs) * self.limits.streams_per_graph

    def compiler(self, name: str) -> Compiler:
        """The compiler of a name, which is none of ``eager``.

        Raises:
            ConfigError: the backend has none of that name.
        """
        if name not in self._compilers:
            raise ConfigError(f"the backend {self.name} has no compiler {name!r}", nearest(name, self._compilers))
        return self._compilers[name]

    @property
    def block_size(self) -> int:
        """Tokens per block of a cache: the config's, or else the one that the backend prefers."""
        preferred = self.limits.block_sizes
        return self.config.cache.block_size or (preferred[0] if preferred else DEFAULT_BLOCK_SIZE)

    def activate(self) -> None:
        """Make ``hal.ops`` go to this backend, process-wide, from the next call on.

        Raises:
            ClosedError: it is closed.
        """
        global _active
        with _activating, self.uses:
            self.table.resolve(self.resolve)
            ops.activate(self.resolve)
            _active = self

    def enter(self) -> Any:
        """Make operations that this context calls run on this backend, active or not, until :meth:`leave`.

        A runner does so for each step. A driver whose kernels need their device to be the thread's current one
        overrides both.

        Returns:
            What :meth:`leave` takes.
        """
        return enter(self.table)

    def leave(self, token: Any) -> None:
        """End what :meth:`enter` began."""
        leave(token)

    def resolve(self, operation: Operation) -> Kernel:
        """What an operation runs on this backend."""
        return self.kernels.get(operation.name) or self._stand_in(operation, operation.body)

    def configure(self, config: Config) -> None:
        """Take over the configuration it was opened with; refuse what this backend cannot do.

        Raises:
            ConfigError: a value is of a wrong type, or a compiler, dtype or block size that the backend does not have.
            ClosedError: the backend is closed.
        """
        self.uses.check_open()
        config = load(config)
        config = attrs.evolve(config, compilation=by_own_names(config.compilation, self.aliases))
        check_compilation(self, config.compilation)
        if config.dtype != "auto":
            self.check_dtype(getattr(torch, config.dtype))
        check_block_size(self.name, config.cache.block_size, self.limits.block_sizes)
        self.config = config
        self.table.resolve(self.resolve)  # what stands in for missing kernels depends on the config
        if self.active:
            self.activate()

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

    def prepare_weight(self, weight: Tensor, use: WeightUse) -> Tensor:
        """Bring a weight into the form that this backend's kernels take it in; called once for each, at load.

        It gets the tensors that an operation takes as one of its ``weights``, as a layer declares it
        (:class:`hal.nn.Weight`), or a quantisation scheme. Answer by ``use``: an operation that is not known, such as
        one of another package's, takes its weights as they are.

        Args:
            weight: on the backend's device, of the shape that the operation takes.
            use: the operation and its argument, what the model computes in, and whether the tensor stays for another
                use.

        Returns:
            ``weight`` itself by default, else what the operation gets in its place, of the same shape, in any layout.
        """
        return weight

    def plain_weight(self, weight: Tensor) -> Tensor:
        """What :meth:`prepare_weight` made, as torch copies it to other devices and saves it.

        Args:
            weight: prepared, or any other tensor of a model that was loaded on this backend.

        Returns:
            ``weight`` itself by default, which will do for a layout that torch brings out of by copying; else a tensor
            of the same shape and dtype, in an ordinary layout.
        """
        return weight

    def _refuse_operations(self) -> None:
        global _active
        try:
            self.table.resolve(refusing(self.name))
        finally:
            with _activating:
                if _active is self:
                    ops.activate(refusing(self.name))
                    _active = None


_activating = threading.RLock()
"""Held while the active backend changes, so that it and what the operations run agree."""
_active: Backend | None = None


def active_backend() -> Backend | None:
    """The backend that ``hal.ops`` goes to, or None: before one is opened, and when the active one was closed."""
    return _active
