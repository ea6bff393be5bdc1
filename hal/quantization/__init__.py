"""Quantised checkpoints: one file for each scheme, and for each format that describes which layers have which.

``scheme`` is what a scheme says, ``registry`` finds them, ``read_quantization`` finds and reads
a checkpoint's description.
"""
