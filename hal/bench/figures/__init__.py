"""What a benchmark measures: times, launches, peak memory, and the floor that memory bandwidth sets."""
