"""Kernels that are not torch's, or that Python launches: each is implemented as a function on the current stream."""
