"""Kernels that support only some options or some forms of weights of their operation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from hal.errors import OperationError, nearest
from hal.ops.declaration.operation import Operation, operation
from hal.ops.forms import FLOAT, Form
from hal.ops.kernels.kernel_table import Kernel


@attrs.frozen(eq=False)
class PartialKernel:
    """A kernel that supports only some options of its operation, and the kernel of other calls.

    An option is a field of the operation's options that has a default, or an argument that may be None. A call sets it
    with another value.

    Attributes:
        operation: the operation, given by its name.
        kernel: takes the operation's arguments by position. It is never called with an option that it does not support.
        supports: the names of the options that it supports. Options that a later version of hal adds are not among
            them, so that the kernel does not ignore them.
        otherwise: the kernel of other calls; None for the operation's body.
        composes: for reports, a function of the operation's arguments, whose tensors may be fake and have symbolic
            sizes. It returns what ``kernel`` itself runs in smaller operations, such as ``3 heads``; None for nothing.

    Raises:
        OperationError: the operation does not have an option in ``supports``.
    """

    operation: Operation = attrs.field(converter=operation)
    kernel: Kernel
    supports: Collection[str]
    otherwise: Kernel | None = None
    composes: Callable[..., tuple[str, ...]] | None = None
    _function: Kernel = attrs.field(init=False, repr=False)

    @_function.default
    def _with_body(self) -> Kernel:
        for name in self.supports:
            if name not in self.operation.node_form.optional:
                raise OperationError(
                    f"a kernel for {self.operation.name} supports {name!r}, which is not an option of it",
                    nearest(name, self.operation.node_form.optional),
                )
        return self.bound(self.operation.reference)

    def __call__(self, *args: Any) -> Any:
        """Run the operation."""
        return self._function(*args)

    @property
    def lacks(self) -> tuple[str, ...]:
        """The options that the kernel does not support."""
        return tuple(name for name in self.operation.node_form.optional if name not in self.supports)

    def unsupported(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the options that a call sets and that the kernel does not support.

        Args:
            arguments: those of the operation's graph node, by name.
        """
        defaults = self.operation.node_form.optional
        return tuple(
            name for name in self.lacks if arguments[name] is not defaults[name] and arguments[name] != defaults[name]
        )

    def bound(self, body: Kernel) -> Callable[..., Any]:
        """Return a function of the operation's arguments that chooses the kernel of each call.

        Its attribute ``chosen`` is a function of the same arguments that returns the kernel.
        """
        form, names = self.operation.node_form, list(self.operation.signature.parameters)
        namespace: dict[str, Any] = {"_kernel": self.kernel, "_otherwise": self.otherwise or body}
        tests = []
        for name in self.lacks:
            place, default = name if name in names else f"{names[-1]}.{name}", form.optional[name]
            namespace[f"_{name}"] = default
            tests.append(f"{place} is None" if default is None else f"{place} == _{name}")
        given = ", ".join(names)
        choice = f"_kernel if {' and '.join(tests) or 'True'} else _otherwise"
        source = f"def chosen({given}):\n return {choice}\ndef run({given}):\n return ({choice})({given})\n"
        exec(compile(source, f"<a kernel of {self.operation.name}>", "exec"), namespace)
        run: Callable[..., Any] = namespace["run"]
        run.chosen = namespace["chosen"]  # type: ignore[attr-defined]
        return run


Takes = Callable[[Form], bool]
"""Returns whether a kernel takes weights of a form."""


def plain(form: Form) -> bool:
    """Return whether a form is that of floating-point weights, which have no scales."""
    return form == FLOAT


@attrs.frozen(eq=False)
class FormKernels:
    """The kernels of an operation, by the forms of weights that they take.

    Attributes:
        operation: the operation, given by its name: ``linear``, ``grouped_linear``, ``embedding`` or another whose
            options are a :class:`hal.ops.Form`.
        kernels: which forms each takes, and the kernel, which takes the operation's arguments by position. The first
            that takes the form of a call runs.
        otherwise: the kernel of weights in other forms; None for the operation's body.

    Raises:
        OperationError: the operation takes no form.
    """

    operation: Operation = attrs.field(converter=operation)
    kernels: Sequence[tuple[Takes, Kernel]]
    otherwise: Kernel | None = None
    _known: dict[Form, Kernel | None] = attrs.field(factory=dict, init=False, repr=False)
    _function: Kernel = attrs.field(init=False, repr=False)

    @_function.default
    def _with_body(self) -> Kernel:
        if not self.operation.takes_forms:
            raise OperationError(
                f"kernels for forms of weights are given for {self.operation.name}, which takes none",
                "register one kernel, or a hal.vendor.PartialKernel",
            )
        return self.bound(self.operation.reference)

    def __call__(self, *args: Any, **out: Any) -> Any:
        """Run the operation."""
        return self._function(*args, **out)

    def taking(self, form: Form) -> Kernel | None:
        """Return the kernel that takes weights of a form, or None."""
        if form not in self._known:
            self._known[form] = next((kernel for takes, kernel in self.kernels if takes(form)), None)
        return self._known[form]

    @property
    def lacks(self) -> tuple[str, ...]:
        """The options that no kernel supports: none that has a name; see :meth:`unsupported`."""
        return ()

    def unsupported(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the form of a call, as text, if no kernel takes it.

        Args:
            arguments: those of the operation's graph node, by name.
        """
        form = Form(*(arguments[each.name] for each in attrs.fields(Form)))
        return (str(form),) if self.taking(form) is None else ()

    def bound(self, body: Kernel) -> Callable[..., Any]:
        """Return a function of the operation's arguments that chooses the kernel of each call.

        Its attribute ``chosen`` is a function of the same arguments that returns the kernel.
        """
        other = self.otherwise or body
        known = {FLOAT: self.taking(FLOAT) or other}
        of_float = known[FLOAT]

        def chosen(*arguments: Any) -> Kernel:
            form = arguments[-1]
            if (found := known.get(form)) is None:
                found = known[form] = self.taking(form) or other
            return found

        def run(*arguments: Any, out: Any = None) -> Any:
            # Most calls are of floating-point weights, and looking up a form takes as long as a small product.
            kernel = of_float if arguments[-1] is FLOAT else chosen(*arguments)
            return kernel(*arguments) if out is None else kernel(*arguments, out=out)

        run.chosen = chosen  # type: ignore[attr-defined]
        return run


@attrs.frozen(eq=False)
class AddedKernel:
    """A kernel that a package adds to another package's driver, registered in the entry-point group ``hal.kernels``.

    Attributes:
        backend: the driver's name.
        operation: the operation's name: ``linear``, ``grouped_linear`` or ``embedding``.
        takes: returns whether it takes weights of a form. It runs before the driver's own kernels of such forms.
        kernel: takes the operation's arguments by position.
    """

    backend: str
    operation: str
    takes: Takes
    kernel: Kernel

    def before(self, others: Kernel | None) -> FormKernels:
        """Return the kernels of the operation: this one, and those that the driver has."""
        own: tuple[Takes, Kernel] = (self.takes, self._filling)
        if isinstance(others, FormKernels):
            return FormKernels(self.operation, (own, *others.kernels), others.otherwise)
        return FormKernels(self.operation, (own, (lambda form: True, others)) if others is not None else (own,))

    def _filling(self, *arguments: Any, out: Any = None) -> Any:
        """Run the kernel, and write its result to a tensor that a replay gives."""
        result = self.kernel(*arguments)
        return result if out is None else out.copy_(result)


def kernel_of(kernel: Kernel | None, form: Form) -> Kernel | None:
    """Return which kernel of an operation takes weights of a form; None for the operation's body."""
    if isinstance(kernel, FormKernels):
        kernel = kernel.taking(form) or kernel.otherwise
    added = getattr(kernel, "__self__", None)
    return added.kernel if isinstance(added, AddedKernel) else kernel
