"""Benchmarks against the hardware's limits and against other implementations: what ``hal bench`` runs.

plan.py says what to measure and refuses what cannot be; ours.py and theirs.py make the contenders, workload.py what all
of them compute; measure.py lets them take turns (timing.py) with the probes of floor.py; report.py and plot.py show it.
"""
