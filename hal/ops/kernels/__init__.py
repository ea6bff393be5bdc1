"""Dispatch of operations to kernels, and kernels for any PyTorch device."""
