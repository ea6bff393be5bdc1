"""Models as graphs, and what compiles them.

``trace`` turns a model's step into one graph of operations; ``inductor`` gives it to PyTorch's compiler.
"""
