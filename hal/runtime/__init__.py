"""Running models: checkpoints, loading, the runner with its buckets and graphs, and generation."""
