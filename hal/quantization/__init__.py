"""Quantized checkpoints: the quantization schemes, and the formats that describe how each layer is quantized.

``scheme`` is the interface of schemes, ``scheme_registry`` finds them, and ``read_quantization`` finds and reads a
checkpoint's description.
"""
