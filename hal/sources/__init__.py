"""Code of other libraries that hal runs: their models and processors, in the groups of entry points that hal reads."""
