"""Quantised checkpoints: the quantisation schemes, and the formats that describe how each layer is quantised.

``scheme`` is the interface of schemes, ``scheme_registry`` finds them, and ``read_quantization`` finds and reads a
checkpoint's description.
"""
