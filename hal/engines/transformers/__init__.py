"""hal under transformers: its models call hal's operations, eagerly, through transformers' registries.

:func:`use` selects hal for one model. ``torch.compile(model, backend="hal")`` needs nothing from here.
"""

from typing import TYPE_CHECKING

from hal.public_names import imported_on_use

if TYPE_CHECKING:
    from hal.engines.transformers.usage import Usage, use

__all__ = ["Usage", "use"]

# Entry points name modules of this package, which then says what is wrong with transformers.
__getattr__ = imported_on_use(__name__, dict.fromkeys(__all__, "hal.engines.transformers.usage"))
