"""Generation of an operation's public function.

A generated function needs no ``*args``, so a call costs only one Python call more than the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def generate_function(
    body: Callable[..., Any], signature: inspect.Signature, namespace: dict[str, Any], number: int
) -> Callable[..., Any]:
    """Generate a function with ``signature`` that calls ``namespace["_get"]()[number]`` with its arguments.

    Args:
        body: provides the name, docstring, module and annotations.
        signature: the signature of ``body``, including defaults.
        namespace: the globals of the generated function.
        number: the operation's index in the tables that ``_get`` returns.
    """
    defaults = {f"_default_{p.name}": p.default for p in signature.parameters.values() if p.default is not p.empty}
    namespace |= defaults
    parameters = ", ".join(
        f"{name}=_default_{name}" if f"_default_{name}" in defaults else name for name in signature.parameters
    )
    source = f"def {body.__name__}({parameters}):\n    return _get()[{number}]({', '.join(signature.parameters)})\n"
    exec(compile(source, f"<hal.ops.{body.__name__}>", "exec"), namespace)
    function: Callable[..., Any] = namespace[body.__name__]
    function.__doc__, function.__module__ = body.__doc__, body.__module__
    # Resolved: names in the body's annotations mean nothing in the namespace of the generated function.
    function.__annotations__ = get_type_hints(body)
    return function
