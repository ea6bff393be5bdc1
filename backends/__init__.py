"""The drivers that come with hal, one folder each. Imported as ``hal.backends``.

They register through entry points as any vendor's do, and have no privileges.
"""
