"""The implementation of ``hal bench``: benchmarks against hardware limits and other implementations.

``plan.py`` validates the plan. The implementations are ``hal_side.py``, ``transformers_side.py`` and ``llama_side.py``;
``workload.py`` is what they share. ``measurement.py`` compares them, and times them in turns (``timing.py``) with the
probes of ``floor.py``. ``bench_report.py`` presents the result, and ``plot.py`` draws its figures.
"""
