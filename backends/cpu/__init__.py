"""The CPU driver: the default that works everywhere.

driver.py opens it, kernels.py holds what beats the references, tape.py is its graph, plan.py the graph's memory.
"""

from .driver import CpuDriver

__all__ = ["CpuDriver"]
