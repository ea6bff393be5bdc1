"""Rewrites: the declaration, its pattern, how a match is found and replaced, and the proof that it is right."""
