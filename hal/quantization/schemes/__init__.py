"""The quantization schemes, one module each, and what those with a scale for each output share."""
