"""The CPU driver: the default that works everywhere.

driver.py opens it, kernels.py holds what beats the references, tape.py is its graph, which recorder.py records,
replay_plan.py the memory of a graph.
"""

from .driver import CpuDriver

__all__ = ["CpuDriver"]
