"""Registration of operations in torch.library, so that each is one node in every traced graph.

The declared axes and dtypes say most of an operation's results for fake tensors, as in a trace. Where a declaration
leaves a size open, such as that of gathered tokens, the reference implementation computes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import wrapt
from torch import Tensor
from torch._ops import OpOverload

from hal.errors import OperationError
from hal.ops.declaration.constraints import Constraints
from hal.ops.declaration.node_form import NodeForm
from hal.ops.kernels.kernel_table import Kernel

_libraries: dict[str, torch.library.Library] = {}


class Registrable(Protocol):
    """The part of :class:`~hal.ops.declaration.operation.Operation` that is registered in torch.library."""

    name: str
    namespace: str
    function: Callable[..., Any]
    mutates: tuple[str, ...]
    host: tuple[str, ...]
    constraints: Constraints
    node_form: NodeForm

    @property
    def qualified_name(self) -> str: ...

    @property
    def reference(self) -> Kernel: ...

    @property
    def kernel_of_node(self) -> Kernel: ...


def register(operation: Registrable) -> OpOverload:
    """Define ``operation`` in its namespace, with its kernel, fake and Dynamo substitution. Return the overload."""
    library = _libraries.get(operation.namespace)
    if library is None:
        library = _libraries[operation.namespace] = torch.library.Library(operation.namespace, "FRAGMENT")
    schema = torch.library.infer_schema(operation.node_form.prototype(), mutates_args=operation.mutates)
    library.define(operation.name + schema)
    run = _implementation(operation, lambda: operation.kernel_of_node)
    library.impl(operation.name, run, "CompositeExplicitAutograd")
    fake = _implementation(operation, lambda: fake_of(operation.constraints, operation.host, operation.reference))
    torch.library.register_fake(operation.qualified_name, fake, lib=library)
    overload: OpOverload = getattr(getattr(torch.ops, operation.namespace), operation.name).default
    # Importing Dynamo takes over a second, and only compilers need it.
    wrapt.register_post_import_hook(lambda _: _substitute_in_dynamo(operation, overload), "torch._dynamo")
    return overload


def _implementation(operation: Registrable, kernel: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    pack = operation.node_form.pack

    def implementation(*args: Any, **kwargs: Any) -> Any:
        given = pack(args, kwargs)
        tensors = [value for value in given if isinstance(value, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise OperationError(
                f"{operation.name} was called with a tensor that requires grad; hal supports inference only",
                "call it under torch.inference_mode() or torch.no_grad(), or detach the tensor",
            )
        return without_aliases(kernel()(*given), tensors)

    return implementation


def without_aliases(result: Any, inputs: Sequence[Tensor]) -> Any:
    """Copy every output that shares memory with an input or an earlier output, as torch.library requires.

    Outputs are also made contiguous, because a fake must know the strides of every kernel's result.
    """
    # A weight in a vendor's layout has no accessible storage, and nothing can alias it.
    seen = {tensor.untyped_storage()._cdata for tensor in inputs if tensor.layout is torch.strided}

    def copied(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata in seen:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        tensor = tensor.contiguous()
        seen.add(tensor.untyped_storage()._cdata)
        return tensor

    if isinstance(result, Tensor):
        return copied(result)
    return None if result is None else tuple(copied(tensor) for tensor in result)


def _substitute_in_dynamo(operation: Registrable, overload: OpOverload) -> None:
    # Dynamo traces this function, of the same arguments, in place of the public one, and so records the node.
    substitute = torch.compiler.substitute_in_graph(operation.function, skip_signature_check=True)
    substitute(operation.node_form.caller(overload, operation.name))


def fake_of(constraints: Constraints, host: Sequence[str], reference: Kernel) -> Kernel:
    """Return the fake implementation of an operation. Its outputs are contiguous, and alias nothing.

    Args:
        constraints: the declared axes and dtypes.
        host: the arguments on the host.
        reference: computes the results of calls of which the declaration leaves a size or dtype open, or which violate
            it, and then says how.
    """

    # The dispatcher omits arguments at the end that equal their defaults, which may be sizes.
    defaults = [each.default for each in inspect.signature(reference).parameters.values()]

    def fake(*args: Any) -> Any:
        args = (*args, *defaults[len(args) :])
        derived = constraints.derived_results(args)
        if derived is None:
            mode = next((each.fake_mode for each in args if hasattr(each, "fake_mode")), None)
            environment = None if mode is None else mode.shape_env
            # Conditions of the reference on sizes must not become guards: a kernel has none.
            with nullcontext() if environment is None else environment.suppress_guards():
                return reference(*args)
        given = zip(constraints.arguments, args, strict=False)
        device = next((each.device for name, each in given if isinstance(each, Tensor) and name not in host), None)
        results = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in derived)
        return results[0] if len(results) == 1 else results or None

    return fake
