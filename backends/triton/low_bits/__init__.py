"""Triton kernels of projections with weights of 4 and 8 bits and floating-point activations."""
