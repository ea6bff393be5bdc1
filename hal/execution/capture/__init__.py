"""Captured steps: which sizes are captured, what capturing costs, and the full graph of a step."""
