"""hal under transformers: its models call hal's operations, eagerly, through transformers' registries.

:func:`use` selects hal for one model. ``torch.compile(model, backend="hal")`` needs nothing from here.
"""

from hal.engines.transformers.usage import Usage, use

__all__ = ["Usage", "use"]
