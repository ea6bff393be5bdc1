"""Kernels in C++ for what a decode step does between its matrix products, compiled on first use.

``build`` compiles and caches them; ``kernels`` binds them as kernels of the operations.
"""
