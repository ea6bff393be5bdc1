"""GGUF files: their header, the values of their tensors, and the checkpoint that they make."""
