"""What ``hal doctor`` examines: Python, torch and packages here, and each driver in a process of its own.

``examine.py`` is the whole of it; ``subject.py`` runs in the process that may crash. No vendor is known here.
"""
