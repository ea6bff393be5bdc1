"""Conformance cases of devices, streams and memory."""
