"""A package separate from hal, which registers plugins that hal does not know."""
