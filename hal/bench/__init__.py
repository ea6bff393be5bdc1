"""The implementation of ``hal bench``: benchmarks against hardware limits and other implementations.

``plan.py`` validates the plan. ``contenders`` holds the implementations and their common workload. ``measurement.py``
times them in turns (``figures/timing.py``) with the probes of ``figures/floor.py``. ``bench_report.py`` presents the
result, and ``plot.py`` draws its figures.
"""
