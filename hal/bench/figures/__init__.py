"""The figures of a benchmark: times, kernel launches, peak memory, agreement of logits, and the hardware floor."""
