"""Generation of text: the loop that schedules sequences, sampling, and streaming of the text."""
