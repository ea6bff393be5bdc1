"""Adapters, each of which runs hal inside an engine through the engine's public plugin interface."""
