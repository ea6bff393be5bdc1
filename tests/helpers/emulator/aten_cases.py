"""The cases of test_aten.py: every ATen operation that the emulated CANN implements."""

from __future__ import annotations

from helpers.emulator.aten_indexing import indexing
from helpers.emulator.aten_pointwise import activations, binary, unary
from helpers.emulator.aten_rarer import rarer
from helpers.emulator.aten_reductions import losses, norms, products, reductions
from helpers.emulator.aten_shapes import shapes

FAMILIES = (unary, binary, activations, rarer, reductions, products, norms, losses, indexing, shapes)
CASES = [case for family in FAMILIES for case in family()]
