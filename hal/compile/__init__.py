"""Models as graphs, and what compiles them.

- ``trace`` turns a model's step into one graph of operations.
- ``normalise``, ``inplace`` and ``sizes`` spell it in one way; ``memory`` knows who reads and writes what.
- ``rewrite`` says what takes the place of what; ``structure``, ``pattern``, ``forms``, ``match`` and ``place`` find
  where, ``rewriting`` does it, ``passes`` puts it in order, ``report`` tells, ``proof`` and ``violations`` check a
  rewrite.
- ``clean`` and ``hoist`` leave out what need not be done, or not so often; ``lower`` makes a function of a graph,
  ``split`` several. ``optimise`` is all of it in a row; ``inductor`` hands a graph to PyTorch's compiler.
"""
