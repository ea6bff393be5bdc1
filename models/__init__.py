"""Models, one file per family, imported as ``hal.models``.

A model is found by the architecture name in config.json, through the entry-point group ``hal.models``.
"""
