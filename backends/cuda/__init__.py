"""The CUDA driver, the reference that others are compared with: NVIDIA's GPUs, Ampere and Hopper above all.

``probe`` and ``driver`` load without torch, the rest when the driver is opened. ``triton`` has our kernels in Triton.
"""
