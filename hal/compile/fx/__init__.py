"""FX graphs of a step: how they are made, what their nodes alias, and their normal form."""
