"""Conformance cases of captured graphs and their host values."""
