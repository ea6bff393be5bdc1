"""Declarations of operations: axes, dtypes, samples, tolerance, and the registration in torch.library."""
