"""hal under transformers: its models call hal's operations, eagerly, through transformers' registries.

:func:`use` selects hal for one model. ``torch.compile(model, backend="hal")`` needs nothing from here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.engines.transformers.usage import Usage, use

__all__ = ["Usage", "use"]


def __getattr__(name: str) -> Any:
    """Import transformers on first use: entry points name modules here that say what is wrong with it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("hal.engines.transformers.usage"), name)
