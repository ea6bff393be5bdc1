"""The CPU driver, which is always available.

kernels.py has kernels that are faster than the references, and native/ kernels in C++, which command.py compiles for
machines without a compiler. tape.py is the graph, recorder.py records it, and launch.py plans its memory.

This file does not import torch, for which the help of the command would wait.
"""

from hal.public_names import imported_on_use

__all__ = ["CpuDriver"]

__getattr__ = imported_on_use(__name__, {"CpuDriver": "hal.backends.cpu.driver"})
