"""Benchmarks: `make bench`. They print figures and ratios; none asserts a time."""
