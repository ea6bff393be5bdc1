"""The implementation of ``hal doctor``: Python, torch and packages, and each driver in a separate process.

``examine.py`` is the entry point, ``driver_processes.py`` runs the processes, and ``driver_program.py`` is the program
of one, which may crash. No vendor is named here.
"""
