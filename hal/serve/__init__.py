"""An OpenAI-compatible HTTP server over :class:`hal.LLM`, which ``hal serve`` runs."""
