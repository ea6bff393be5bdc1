"""The CPU driver, which is always available.

kernels.py has kernels that are faster than the references, and native/ kernels in C++. tape.py is the graph,
recorder.py records it, and launch.py plans its memory.
"""

from .driver import CpuDriver

__all__ = ["CpuDriver"]
