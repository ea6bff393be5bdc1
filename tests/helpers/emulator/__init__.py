"""Modules shared by the tests of the emulated CANN."""
