"""Checkpoints in int8: what their formats say of each layer, how their numbers are meant, and how they are written.

``description`` finds the format and reads it; ``compressed_tensors`` and ``modelslim`` are the two; ``arithmetic`` is
what both compute.
"""
