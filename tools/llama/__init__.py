"""llama.cpp as a contender of ``hal bench``: ``llama_side.py`` prepares it, and ``llama_process.py`` runs it."""
