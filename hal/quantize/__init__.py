"""``hal quantize``: calibrate a floating-point model and write a quantized checkpoint."""
