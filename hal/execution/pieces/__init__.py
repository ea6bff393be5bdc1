"""Piecewise steps: the splitting operations run between captured pieces."""
