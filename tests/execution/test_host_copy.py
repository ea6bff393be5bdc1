"""Tests of copies of results to the host."""

from __future__ import annotations

import torch

import hal


def test_a_copy_keeps_its_values() -> None:
    """The next step may overwrite the tensors, on the host too."""
    with hal.open({"backend": "cpu"}, activate=False) as backend:
        tokens, logits = torch.arange(3), torch.ones(2, 4)
        copy = hal.HostCopy(backend, tokens, logits[1:])
        tokens.zero_()
        logits.zero_()
        assert copy.arrived
        first, second = copy.wait()
        assert first.tolist() == [0, 1, 2]
        assert second.tolist() == [[1.0] * 4]


def test_a_copy_of_nothing() -> None:
    with hal.open({"backend": "cpu"}, activate=False) as backend:
        assert hal.HostCopy(backend).wait() == ()
