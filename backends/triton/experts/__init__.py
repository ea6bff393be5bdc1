"""Triton kernels for mixtures of experts: routing, permutation, grouped products and whole MLPs."""
