"""Running models: block and slot allocation, generation, sampling, and `hal quantize`."""
