"""Conformance cases of runners and whole models, against a reference on the CPU."""
