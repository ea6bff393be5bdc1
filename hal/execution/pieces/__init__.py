"""Piecewise steps: splitting operations run eagerly between captured pieces."""
