"""A package beside hal: what it registers, hal knows nothing of, and that changes nothing in it."""
