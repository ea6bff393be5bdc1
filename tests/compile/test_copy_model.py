"""Tests for the copy of a model that a trace runs: what it shares with the model and what it copies."""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import nn

from hal.compile.trace import copy_model


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.register_buffer("unset", None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.layers[1].weight = self.layers[0].weight
        self.again = {"layers": (self.layers[0], [self.layers[1]])}
        self.listed = [self.layers[0].weight]
        self.bound = self.own
        self.constant, self.constants = torch.ones(3), [torch.ones(3)]
        self.handles = [{"lock": threading.Lock()}]
        self.lock = threading.Lock()
        self.beside = [Layer()]
        self.partial = partial(self.own)
        self.register_buffer("shift", torch.zeros(1), persistent=False)
        self.register_forward_hook(lambda module, given, result: (module, result))

    def own(self) -> nn.Module:
        return self

    def forward(self) -> torch.Tensor:
        return self.layers[0].weight


def copied() -> tuple[Model, Model, dict[int, torch.Tensor]]:
    model = Model()
    tensors = {id(each): torch.full_like(each, 7) for each in (*model.parameters(), *model.buffers())}
    copy = copy_model(model, tensors)
    assert isinstance(copy, Model)
    return model, copy, tensors


def test_each_tensor_is_replaced_once() -> None:
    model, copy, tensors = copied()
    weight = tensors[id(model.layers[0].weight)]
    assert all(each is weight for each in (copy.layers[0].weight, copy.layers[1].weight, copy.listed[0]))
    assert dict(copy.named_buffers()) == {"shift": tensors[id(model.shift)]}
    assert copy.layers[0].unset is None
    assert model.layers[0].weight.eq(1).all()


def test_each_module_is_copied_once() -> None:
    model, copy, _ = copied()
    assert copy.again["layers"][0] is copy.layers[0] is not model.layers[0]
    assert copy.again["layers"][1][0] is copy.layers[1]
    assert copy.bound() is copy
    assert copy()[0] is copy, "the hook runs, on the copy"
    assert model.bound() is model
    assert model.again["layers"][0] is model.layers[0]


def test_all_else_is_shared() -> None:
    """A copied tensor would be an operation of the trace, and locks cannot be copied."""
    model, copy, _ = copied()
    assert copy.constant is model.constant
    assert copy.constants[0] is model.constants[0]
    assert copy.lock is model.lock
    assert copy.handles[0]["lock"] is model.handles[0]["lock"]
    assert copy.beside[0] is model.beside[0]
    assert copy.partial is model.partial


def test_what_the_copy_sets_is_not_seen_in_the_model() -> None:
    model, copy, _ = copied()
    copy.training, copy.layers[0].extra = not model.training, 3
    copy.listed.append(None)
    assert copy.training != model.training
    assert not hasattr(model.layers[0], "extra")
    assert len(model.listed) == 1
