"""Conformance cases of operations and rewrites, drawn from their declarations."""
