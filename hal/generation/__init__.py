"""Text generation: scheduling of sequences, sampling, and streaming of text."""
