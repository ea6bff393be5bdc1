"""Checkpoints: safetensors files, weight bindings, validation, and the registry of models."""
