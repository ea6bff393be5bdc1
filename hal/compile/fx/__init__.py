"""FX graphs of a step: tracing, normal form, alias analysis, and clean-up."""
