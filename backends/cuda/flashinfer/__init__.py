"""FlashInfer's attention: kernels, and the plans that it makes on the host before each step."""
