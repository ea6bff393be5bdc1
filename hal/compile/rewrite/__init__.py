"""Rewrites: declaration, pattern matching, replacement, and the proof on samples."""
