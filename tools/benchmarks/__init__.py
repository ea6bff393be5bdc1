"""Benchmarks, run by `make bench`. They print figures and ratios; none asserts a duration."""
