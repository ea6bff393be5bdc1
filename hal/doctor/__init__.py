"""What ``hal doctor`` examines: Python, torch and packages here, and each driver in a process of its own.

``examine.py`` is the whole of it, ``together.py`` runs the processes, and ``subject.py`` is what runs in one and may
crash. No vendor is known here.
"""
