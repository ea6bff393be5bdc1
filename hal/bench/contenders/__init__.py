"""What a benchmark compares: hal, transformers and extensions, on one workload with the same random weights."""
