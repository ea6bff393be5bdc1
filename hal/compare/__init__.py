"""Comparing a model's runs: one backend's with another's operation by operation, or the modes of one backend.

:mod:`backends` and :mod:`modes` do so, :mod:`report` shows what was found, and :mod:`saved` keeps a call to replay.
"""
