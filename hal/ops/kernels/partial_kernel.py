"""Kernels that support only some options of their operation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs

from hal.errors import OperationError, nearest
from hal.ops.declaration.operation import Operation, operation
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

    Raises:
        OperationError: the operation does not have an option in ``supports``.
    """

    operation: Operation = attrs.field(converter=operation)
    kernel: Kernel
    supports: Collection[str]
    otherwise: Kernel | None = None
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

        Args:
            body: runs the operation's body.
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
