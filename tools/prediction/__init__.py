"""Predicts a step's time on several devices, from a model's config and stated bandwidths; nothing is measured.

``assumptions.py`` holds what is stated, ``step_work.py`` counts a rank's work, and ``deployments.py`` has the formula.
"""
