"""The implementations that a benchmark compares, and the workload that they share."""
