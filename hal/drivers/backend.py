"""Backends: an opened driver, with its device, kernels, compilers, limits, graphs and states.

:mod:`hal.drivers.backend_resources` implements what happens when a backend is closed.
"""

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
from hal.device.device import DEFAULT_BLOCK_SIZE, Device, Limits
from hal.drivers.backend_checks import (
    check_arguments,
    check_block_size,
    check_conditions,
    check_layers,
    check_rewrites,
    check_state_layout,
    layout_refused,
    reads_layout,
)
from hal.drivers.backend_operations import BackendOps, ReferenceFallbacks, closed_resolver, with_added
from hal.drivers.backend_resources import BackendResources
from hal.drivers.compiler import (
    EAGER,
    SPLITTING_OPS,
    Compiler,
    check_aliases,
    check_compilation,
    check_compilers,
    check_invariant,
    compilers_of,
    pass_name,
    resolve_aliases,
)
from hal.drivers.invariance import invariant_kernel, invariant_kernels
from hal.drivers.stowed_weight import StowedWeight
from hal.errors import ConfigError, DriverIncompatible, nearest
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel, Table, enter, leave
from hal.ops.kernels.partial_kernel import FormKernels, PartialKernel, kernel_of
from hal.ops.kernels.prepared_arguments import check_kernel
from hal.parallel import collectives
from hal.parallel.mesh import Mesh, joined

if TYPE_CHECKING:
    from hal.nn.weights.weight import WeightUse

LayerMaker = Callable[[Any], nn.Module]
"""Return the replacement of a layer whose weights are not loaded yet, or the layer itself to keep it."""


class Backend(BackendResources):
    """An opened driver.

    Drivers construct this class, or a subclass that overrides ``graph`` and ``allocate``.

    As a context manager, a backend is closed at the end of the block. :meth:`close` frees all graphs, streams, caches
    and workspaces of the backend and of its runners. The weights stay with the model. Afterwards the backend, its
    runners, its graphs and ``backend.ops`` raise ClosedError. If the backend was active, no backend is active
    afterwards, and ``hal.ops`` raises ClosedError until another is activated. Other backends are not affected.

    Args:
        name: the driver's name.
        device: the device that the backend runs on.
        kernels: callables by operation name, with the operation's arguments, or a
            :class:`~hal.vendor.PartialKernel`. An operation without a kernel runs its reference
            implementation.
        graphs: whether :meth:`graph` supports capture. If so, hal's capturing compilers support the backend.
        compilers: the driver's compilers. Omit registered compilers, including hal's.
        aliases: compiler names by the additional name that a configuration may use for them.
        rewrites: the driver's graph rewrites, which run before those of the fused operations. A rewrite named after a
            fused operation replaces that operation's rewrite, for example to restrict where it applies.
        layers: replacements by class of ``hal.nn``: a subclass whose constructor takes the original layer, or a
            function of the original layer. Hardware with a kernel for the operation needs none.
        native_names: hal's operation names by the vendor's, such as ``atb._npu_paged_attention``.
        capabilities: names of the optional features that the backend supports.
        limits: see :class:`hal.vendor.Limits`.
        inductor: operations that Inductor calls as opaque kernels; it decomposes the others. None if the compiler
            ``inductor`` does not support this backend.
        state_layout: ``canonical``, or the driver's name for the layout that its ``allocate`` uses. Only the driver's
            kernels can read another layout than the canonical one.
        sources: the library of each kernel, by operation name, for drivers that choose among several libraries.
        conditions: functions by fused operation, for a kernel that does not serve every call, or not faster than the
            smaller operations. Called with the arguments of a site in a graph, whose tensors are fake and may have
            symbolic sizes; returns the reason to keep the smaller operations there, or None. The kernel must still be
            right for every call.
        invariant: for ``numerics.invariant``, kernels by operation name, of ``kernels`` or in their place, that give
            a row the same bits whatever the other rows are, and however a sequence is divided between calls. Those of
            fused operations compute as the smaller operations' do. Others are called for one row at a time, or refused.
        distributed: the backend of ``torch.distributed`` for the device's tensors, such as ``gloo``; None if several
            devices cannot work together. The collective operations then have kernels on ``torch.distributed``, unless
            ``kernels`` has others.

    Attributes:
        mesh: the ranks that this process works with, as ``parallel`` in the configuration asks. The backend closes a
            mesh that it made itself.

    Raises:
        OperationError: a kernel is for an unknown operation, or its signature does not match its operation.
        DriverIncompatible: an argument has the wrong type; the state layout is not canonical and an operation on keys
            or values has no kernel; a compiler or rewrite is invalid, or its name is taken; a rewrite does not declare
            the axes and dtypes of a tensor; an alias is a compiler's name, or refers to an unknown compiler; or a layer
            is not a replaceable class of ``hal.nn``.
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
        conditions: Mapping[str, Callable[..., str | None]] = MappingProxyType({}),
        invariant: Mapping[str, Kernel] = MappingProxyType({}),
        distributed: str | None = None,
    ) -> None:
        check_arguments(
            name,
            {
                "name": name,
                "device": device,
                "kernels": kernels,
                "graphs": graphs,
                "compilers": compilers,
                "aliases": aliases,
                "rewrites": rewrites,
                "layers": layers,
                "native_names": native_names,
                "capabilities": capabilities,
                "limits": limits,
                "inductor": inductor,
                "state_layout": state_layout,
                "sources": sources,
                "conditions": conditions,
                "invariant": invariant,
                "distributed": distributed,
            },
        )
        if distributed is not None:
            kernels = {**collectives.KERNELS, **collectives.EXCHANGES, **kernels}
        kernels = with_added(name, kernels)
        for each, kernel in (*kernels.items(), *invariant.items()):
            check_kernel(name, ops.operation(each), kernel)  # a misspelt name would never run
        check_state_layout(name, state_layout, kernels)
        check_conditions(name, conditions, kernels)
        check_compilers(name, compilers)
        check_rewrites(name, rewrites)
        check_layers(name, layers)
        super().__init__(name, device)
        self.kernels = MappingProxyType(dict(kernels))
        self.invariant = MappingProxyType(dict(invariant))
        self.graphs = graphs
        self.inductor = None if inductor is None else frozenset(ops.operation(each).name for each in inductor)
        self._compilers = compilers_of(self, compilers)
        self.compilers = (EAGER, *self._compilers)
        self.aliases = MappingProxyType(dict(aliases))
        check_aliases(name, aliases, self.compilers)
        if graphs and type(self).graph is Backend.graph:
            raise DriverIncompatible(
                f"the driver {name} has graphs = True but does not implement them",
                "override Backend.graph, or set graphs = False",
            )
        self.rewrites = tuple(rewrites)
        self.layers = MappingProxyType(dict(layers))
        self.native_names = MappingProxyType(dict(native_names))
        self.capabilities = frozenset(capabilities)
        self.limits = Limits() if limits is None else limits
        self.state_layout = state_layout
        self.sources = MappingProxyType(dict(sources))
        self.conditions = MappingProxyType(dict(conditions))
        self.distributed = distributed
        self._all = self.kernels, self.rewrites
        self.mesh = Mesh()
        self._joined = Mesh()
        self.config = Config(backend=name)
        self._fallback = ReferenceFallbacks(name, lambda: self.config.strict)
        self.table = Table(self.resolve)
        self.ops = BackendOps(self.uses, self.enter, self.leave)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {self.device!r}>"

    @property
    def active(self) -> bool:
        """Whether ``hal.ops`` dispatches to this backend."""
        return _active is self

    @property
    def streams_in_graphs(self) -> int:
        """Number of streams that the captured graphs of this backend's runners hold."""
        return len(self.captured_graphs) * self.limits.streams_per_graph

    @property
    def lockstep(self) -> bool:
        """Whether the data ranks step together, because their layers exchange tokens."""
        return self.mesh.data.size > 1 and self.config.parallel.experts != "split"

    def compiler(self, name: str) -> Compiler:
        """Return the compiler ``name``, except ``eager``, which has no compiler.

        Raises:
            ConfigError: the backend has no compiler of that name.
        """
        if name not in self._compilers:
            raise ConfigError(f"the backend {self.name} has no compiler {name!r}", nearest(name, self._compilers))
        return self._compilers[name]

    @property
    def block_size(self) -> int:
        """Tokens per block of a cache: the configured size, or else the backend's preferred size."""
        preferred = self.limits.block_sizes
        return self.config.cache.block_size or (preferred[0] if preferred else DEFAULT_BLOCK_SIZE)

    def activate(self) -> None:
        """Make ``hal.ops`` dispatch to this backend, process-wide, from the next call on.

        Raises:
            ClosedError: the backend is closed.
        """
        global _active
        with _activating, self.uses:
            self.table.resolve(self.resolve)
            ops.activate(self.resolve)
            _active = self

    def enter(self) -> Any:
        """Run operations called in this context on this backend, active or not, until :meth:`leave`.

        A runner does so for each step. A driver whose kernels require their device to be the thread's current device
        overrides both methods.

        Returns:
            The token to pass to :meth:`leave`.
        """
        return enter(self.table)

    def leave(self, token: Any) -> None:
        """End the dispatch that :meth:`enter` started."""
        leave(token)

    def resolve(self, operation: Operation) -> Kernel:
        """Return the kernel that runs ``operation`` on this backend, or the reference fallback."""
        kernel = self.kernels.get(operation.name)
        if kernel is None and self.state_layout != "canonical" and reads_layout(operation):
            return layout_refused(self.name, self.state_layout, operation)
        if kernel is None and self.config.numerics.invariant and not operation.fused:
            kernel = invariant_kernel(self.name, operation, None)
        if isinstance(kernel, PartialKernel):
            return kernel.bound(self._fallback(operation, operation.body, kernel.supports))
        if isinstance(kernel, FormKernels):
            return kernel.bound(self._fallback(operation, operation.body))
        return kernel or self._fallback(operation, operation.body)

    def configure(self, config: Config) -> None:
        """Apply a configuration.

        Raises:
            ConfigError: a value has the wrong type, or the backend lacks the compiler, dtype or block size.
            ClosedError: the backend is closed.
        """
        self.uses.check_open()
        config = load(config)
        config = attrs.evolve(config, compilation=resolve_aliases(config.compilation, self.aliases))
        check_compilation(self, config.compilation)
        if config.numerics.invariant:
            check_invariant(self, config.compilation)
        if config.dtype != "auto":
            self.check_dtype(getattr(torch, config.dtype))
        check_block_size(self.name, config.cache.block_size, self.limits.block_sizes)
        self._join(config)
        if config.numerics.invariant != self.config.numerics.invariant:
            self._choose_kernels(config.numerics.invariant)
        self.config = config
        self.table.resolve(self.resolve)  # the reference fallbacks depend on the configuration
        if self.active:
            self.activate()

    def _choose_kernels(self, invariant: bool) -> None:
        """Leave the kernels and rewrites that ``numerics.invariant`` permits, or restore all."""
        if invariant:
            self._all = self.kernels, self.rewrites
            held = invariant_kernels(self.name, self.kernels, self.invariant)
            self.kernels, self.rewrites = MappingProxyType(held), ()
        else:
            self.kernels, self.rewrites = self._all

    def _join(self, config: Config) -> None:
        """Join the ranks that ``config.parallel`` asks for."""
        mesh = joined(config.parallel, self.mesh, self.name, self.distributed)
        if mesh is not self.mesh:
            self.mesh = self._joined = mesh

    def splitting_ops(self, config: CompilationConfig, called: Collection[str] | None = None) -> set[str]:
        """Return hal's names of the operations at which a phase is split: of the default, those ``called``."""
        if config.splitting_ops is None and called is not None:
            return {*SPLITTING_OPS} & {*called} or {SPLITTING_OPS[-1]}
        return {self.operation_named(name) for name in config.splitting_ops or SPLITTING_OPS}

    @property
    def pass_names(self) -> tuple[str, ...]:
        """The valid names in ``compilation.passes``: the driver's rewrites, and the fused operations with kernels."""
        fused = [each.name for each in ops.catalogue().values() if each.fused and each.name in self.kernels]
        return tuple(dict.fromkeys((*map(pass_name, self.rewrites), *fused)))

    def operation_named(self, name: str) -> str:
        """Return hal's name of an operation, given that or the vendor's name.

        Raises:
            ConfigError: no operation has that name.
        """
        known = {**self.native_names, **{each: each for each in ops.catalogue()}}
        if name not in known:
            raise ConfigError(
                f"compilation.splitting_ops has {name!r}, which is not the name of an operation", nearest(name, known)
            )
        return known[name]

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ConfigError unless the backend computes in ``dtype``."""
        if dtype not in self.limits.dtypes:
            raise ConfigError(
                f"the backend {self.name} does not compute in {dtype}",
                f"set dtype to one of {', '.join(str(known).removeprefix('torch.') for known in self.limits.dtypes)}",
            )

    def prepare_weights(self, weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
        """Return weights in the form that this backend's kernels take; called once for each use, at load.

        Of a weight with scales, all tensors are given at once: ``weight``, ``weight_scale``, and ``bias`` and
        ``weight_zero_point`` if it has them. Others, such as a floating-point weight and its bias, are given one at a
        time. Decide by ``use``, and return the weights of unknown operations, such as another package's, unchanged.

        Args:
            weights: by the operation's arguments, on the backend's device, with the shapes that the operation takes.
            use: the operation, the form of the weight, the model's compute dtype, and whether the tensors stay for
                another use.

        Returns:
            Tensors by the same arguments, in any layout. It may add one for an argument that was not given, which the
            kernels get, too. The default returns ``weights`` itself.
        """
        return weights

    def describe_kernel(self, weight: Tensor, use: WeightUse) -> str:
        """Return what computes an operation with a weight, for ``hal explain`` and ``hal doctor``.

        Override it if the kernel chooses, for example by the layout of the weight and the number of rows.

        Args:
            weight: a result of :meth:`prepare_weights` for the operation's argument ``weight``.
            use: as for :meth:`prepare_weights`.

        Returns:
            A phrase. The default is the name of the kernel that takes the form, or ``the reference``.
        """
        kernel = kernel_of(self.kernels.get(use.operation), use.form)
        if kernel is None:
            return "the reference"
        name: str = getattr(kernel, "__qualname__", type(kernel).__qualname__)
        return ".".join(filter(None, (kernel.__module__, name.partition(".<locals>")[0])))  # torch's have no module

    def replace_weights(self, prepared: Mapping[str, Tensor], weights: Mapping[str, Tensor], use: WeightUse) -> None:
        """Write new values into the memory of prepared weights, which graphs and compiled code read.

        Override it if :meth:`prepare_weights` may choose another layout in a later call, or if ``copy_`` between two
        tensors of its layout does not work.

        Args:
            prepared: the result of :meth:`prepare_weights` for the former values.
            weights: the new values, as :meth:`prepare_weights` takes them.
            use: as for :meth:`prepare_weights`.
        """
        for name, value in self.prepare_weights(weights, use).items():
            prepared[name].copy_(value)

    def plain_weight(self, weight: Tensor) -> Tensor:
        """Return a prepared weight in a form that torch can copy to other devices and save.

        Args:
            weight: a result of :meth:`prepare_weights`, or any other tensor of a model that was loaded on this backend.

        Returns:
            A tensor of the same shape and dtype in an ordinary layout. The default returns ``weight`` itself, which is
            right for layouts that torch converts when it copies.
        """
        return weight

    def stow_weight(self, weight: Tensor, *, copy: bool) -> StowedWeight:
        """Return what frees the memory of a weight while a runner sleeps, and allocates it again.

        It is called where :meth:`hal.vendor.Device.give_back` returns None. Override it if torch cannot resize the
        storage of a layout of :meth:`prepare_weights`.

        Args:
            weight: as for :meth:`plain_weight`.
            copy: whether it gets its values again.
        """
        return StowedWeight(weight, self.plain_weight(weight).to("cpu", copy=True) if copy else None)

    def _free(self) -> None:
        try:
            super()._free()
        finally:
            self._joined.close()  # An engine closes the mesh that it gave.

    def _refuse_operations(self) -> None:
        global _active
        try:
            self.table.resolve(closed_resolver(self.name))
        finally:
            with _activating:
                if _active is self:
                    ops.activate(closed_resolver(self.name))
                    _active = None


_activating = threading.RLock()
"""Held while the active backend changes, so that ``_active`` and the dispatch of operations agree."""
_active: Backend | None = None


def active_backend() -> Backend | None:
    """Return the backend that ``hal.ops`` dispatches to.

    Returns:
        None before a backend is opened, and after the active one is closed.
    """
    return _active
