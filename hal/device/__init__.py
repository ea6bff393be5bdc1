"""Hardware abstraction: device, stream, event, memory, graph and limits.

The defaults use PyTorch's device-generic runtime.
"""
