"""Kernels that are not torch's own, or are called by Python: what each computes, as work on the current stream."""
