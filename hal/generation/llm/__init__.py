"""hal.LLM: a model by name; its thread, chat templates, scores and embeddings."""
