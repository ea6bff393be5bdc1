"""The table of test_aten.py: every ATen operation that the emulated CANN knows."""

from __future__ import annotations

from aten_indexing import indexing
from aten_pointwise import activations, binary, unary
from aten_rarer import rarer
from aten_reductions import losses, norms, products, reductions
from aten_shapes import shapes

FAMILIES = (unary, binary, activations, rarer, reductions, products, norms, losses, indexing, shapes)
CASES = [case for family in FAMILIES for case in family()]
