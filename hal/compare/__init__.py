"""Comparison of a model's runs: two backends operation by operation, or the compile modes of one backend.

``compare_backends.py`` and ``compare_modes.py`` run the comparisons, ``comparison_report.py`` formats the results, and
``saved_call.py`` stores a call for replay.
"""
