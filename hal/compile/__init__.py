"""Compilation of a model's step through FX graphs.

- ``trace`` turns a step into a graph of operations. ``fx`` brings the graph into a normal form and analyses aliases.
- ``rewrite`` declares, finds, applies and checks rewrites. ``pass_manager`` runs them in order, and ``rewrite_report``
  reports on them.
- ``recognize`` finds hal's operations in models in plain torch.
- ``fx.clean`` removes redundant nodes. ``lower`` turns a graph into a function, ``split`` into several.
- ``optimize`` runs all stages. ``inductor_backend`` compiles a graph with Inductor; ``dynamo_backend`` is the backend
  ``hal`` of ``torch.compile``.
"""
