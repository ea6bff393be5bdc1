"""Models, one readable file a family. Imported as ``hal.models``.

A model is found by the architecture name of its checkpoint's config.json, through the entry-point group ``hal.models``.
"""
