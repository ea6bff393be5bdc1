"""Captured steps: the sizes to capture, the capture budget, and graphs of whole steps."""
