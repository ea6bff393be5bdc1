"""A package beside hal: models, operations and a compiler that hal knows nothing of, and that change nothing in it."""
