"""A backend: an opened driver. It holds what models run on: a device, kernels, limits, graphs, caches."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.config import CompilationConfig, Config, load
from hal.device.closing import Closable
from hal.device.device import Device
from hal.device.graph import CAPTURING, Captures, Graph, check_not_capturing
from hal.device.limits import DEFAULT_BLOCK_SIZE, Limits
from hal.device.memory import lacking_memory
from hal.device.stream import Stream
from hal.drivers.backend_checks import check_arguments, check_layers, check_rewrites, check_state_layout
from hal.drivers.backend_operations import BackendOps, StandIns, refusing
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
from hal.errors import (
    ConfigError,
    DeviceError,
    DeviceOutOfMemory,
    DriverIncompatible,
    HalError,
    nearest,
)
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.call_signature import check_kernel
from hal.ops.kernels.kernel_table import Kernel, Table, enter, leave
from hal.step.state import StateMemory, StateSpec, canonical_states

if TYPE_CHECKING:
    from hal.nn.weight import WeightUse

LayerMaker = Callable[[Any], nn.Module]
"""From a layer without values to the one in its place, or to the layer itself where that stays."""


class Backend(Closable):
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
        super().__init__(f"the backend {name}", "open it again with hal.open")
        self.name = name
        self.device = device
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
        self._stand_in = StandIns(self)
        self.table = Table(self.resolve)
        self.ops = BackendOps(self, self._stand_in)
        self.captured_graphs: WeakSet[Graph] = WeakSet()
        self.runners: WeakSet[Closable] = WeakSet()
        self._made: WeakSet[Graph] = WeakSet()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, guard in _GUARDS.items():  # so that no driver has to think of closing here
            if name in vars(cls):
                setattr(cls, name, guard(vars(cls)[name]))

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
        size, sizes = config.cache.block_size, self.limits.block_sizes
        if size is not None and sizes and size not in sizes:
            raise ConfigError(
                f"cache.block_size {size} does not suit the backend {self.name}",
                f"use one of {', '.join(map(str, sizes))}",
            )
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

    def graph(self) -> Graph:
        """A new, empty graph. The backend closes it when it is closed itself.

        Raises:
            ConfigError: the driver brings no graphs.
            ClosedError: the backend is closed.
        """
        raise ConfigError(f"the backend {self.name} has no graphs", 'use the compiler "eager"')

    def capturing(self, stream: Stream | None = None) -> AbstractContextManager[Captures]:
        """A block in which several graphs of this backend are captured, one after the other; see `Graph.capturing`."""
        return self.graph().capturing(stream)

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

    def allocate(self, spec: StateSpec) -> StateMemory:
        """Allocate a model's states, zeroed, in a layout of the backend's choosing; by default the canonical one."""
        with self.uses:
            return canonical_states(spec, self.device.torch)

    def explain(self, error: BaseException) -> HalError | None:
        """The typed error for an exception that PyTorch or the vendor's package raised, or None if it is not known.

        Runners ask here, so that callers meet :class:`~hal.errors.DeviceError`, whatever the vendor raises. By default
        it knows torch's own exceptions for devices.
        """
        if what := lacking_memory(error):
            return DeviceOutOfMemory(what, DeviceOutOfMemory.REMEDY)
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

    def _release(self) -> None:
        """Give back what the driver itself holds: streams, workspaces, handles. :meth:`close` calls it once.

        By then the runners and graphs of this backend are closed, and nothing of theirs runs on the device any more.
        What a process needs for other backends of the same driver stays.
        """

    def _check_closable(self) -> None:
        super()._check_closable()
        check_not_capturing()
        for runner in list(self.runners):
            runner.uses.check_not_mine()

    def _free(self) -> None:
        with ExitStack() as stack:  # goes on to the end, whatever raises
            stack.callback(self._empty_cache)
            stack.callback(self._release)
            stack.callback(self._close_graphs)
            stack.callback(self._deactivate)
            stack.callback(self.table.resolve, refusing(self.name))
            for runner in list(self.runners):
                stack.callback(runner.close)

    def _deactivate(self) -> None:
        global _active
        with _activating:
            if _active is self:
                ops.activate(refusing(self.name))
                _active = None

    def _close_graphs(self) -> None:
        graphs = list(self._made)
        if not graphs:
            return
        with CAPTURING, ExitStack() as stack:
            stack.callback(gc.collect)  # what was captured may refer to itself
            stack.callback(self.captured_graphs.clear)
            for graph in graphs:
                stack.callback(graph.close)
            with self.explaining():
                self.device.synchronize()

    def _empty_cache(self) -> None:
        with CAPTURING:  # a capture of another thread's may be disturbed by it
            self.device.empty_cache()


def _while_open(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count a call among the backend's uses, so that it is refused when the backend is closed."""

    @wraps(method)
    def guarded(self: Backend, *args: Any, **kwargs: Any) -> Any:
        with self.uses:
            return method(self, *args, **kwargs)

    return guarded


def _making_graphs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Likewise, and have the backend close the graph that the call makes."""

    @wraps(method)
    def guarded(self: Backend) -> Any:
        with self.uses:
            graph = method(self)
            self._made.add(graph)
            return graph

    return guarded


_GUARDS = {"graph": _making_graphs, "allocate": _while_open}
"""By the name of a method that drivers override, what is put around theirs."""
_activating = threading.RLock()
"""Held while the active backend changes, so that it and what the operations run agree."""
_active: Backend | None = None


def active_backend() -> Backend | None:
    """The backend that ``hal.ops`` goes to, or None: before one is opened, and when the active one was closed."""
    return _active
