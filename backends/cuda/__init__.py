"""The driver of NVIDIA's GPUs, mainly of the Ampere and Hopper generations, and the reference for other drivers.

``probe`` and ``driver`` can be imported without torch; opening the driver imports the rest. ``flashinfer``
and ``hal.backends.triton`` have kernels.
"""
