"""Speculative decoding: what drafts tokens, how many, and how often the model agrees."""
