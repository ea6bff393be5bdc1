"""The version of the distribution. It has no imports, so that packaging can read it without torch."""

__version__ = "0.1.0"
