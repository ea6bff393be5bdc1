"""From safetensors to a model: files, bindings of weights to their tensors, checks, and the registry of models."""
