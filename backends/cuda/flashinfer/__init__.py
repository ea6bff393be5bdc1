"""FlashInfer's kernels, and the plans that its attention makes on the host before each step."""
