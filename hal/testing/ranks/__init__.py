"""Cases of two ranks. ``rank_cases.py`` starts them, and each runs ``rank_program.py`` with ``rank_checks.py``."""
