"""Modules shared by the tests of the NPU driver."""
