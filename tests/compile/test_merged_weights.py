"""Tests that a compiled model follows its weights, in whatever way they change, although projections are merged."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import hal
from hal.compile.recognize.merge_projections import concatenated, move_together, why_not_moved


@pytest.fixture
def cpu() -> Iterator[hal.Backend]:
    yield hal.open({"backend": "cpu", "dtype": "float32"})
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12, False), nn.Linear(8, 12, False), nn.Linear(12, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.down(functional.silu(self.gate(x)) * self.up(x))
        return self.first(x), self.second(x)


def written_by_another_process(block: Block) -> None:
    block.share_memory()
    child = os.fork()
    if child == 0:
        block.gate.weight.data.numpy()[:] += 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def replaced_by_a_file(block: Block, folder: Path) -> None:
    save_file(
        {name: (each + 0.5).contiguous() for name, each in block.state_dict().items()}, folder / "new.safetensors"
    )
    block.load_state_dict(load_file(folder / "new.safetensors"), assign=True)


def transposed(block: Block) -> None:
    block.first.weight.data = block.first.weight.data.t()


def in_a_new_storage(block: Block) -> None:
    block.gate.weight.data = block.gate.weight.data + 1


WAYS: dict[str, Callable[[Block], object]] = {
    "data.copy_": lambda block: block.gate.weight.data.copy_(torch.randn(12, 8)),
    "a bias": lambda block: block.second.bias.data.add_(1),
    "numpy": lambda block: block.up.weight.detach().numpy().__iadd__(1),
    "dlpack": lambda block: torch.from_dlpack(block.first.weight.detach()).mul_(2),
    "foreach": lambda block: torch._foreach_add_([each.data for each in block.parameters()], 0.5),
    "LoRA, merged": lambda block: block.gate.weight.data.__iadd__(torch.ones(12, 1) @ torch.ones(1, 8)),
    "an optimizer": lambda block: torch.optim.SGD(block.parameters(), lr=0.1, foreach=True).step(),
    "load_state_dict": lambda block: block.load_state_dict({n: e * 1.5 for n, e in block.state_dict().items()}),
    "another process": written_by_another_process,
    "transposed": transposed,
    "data = other": in_a_new_storage,
    "in place, after that": lambda block: block.gate.weight.data.add_(1),
    "another parameter": lambda block: setattr(block.up, "weight", nn.Parameter(torch.randn(12, 8))),
    "assigned": lambda block: block.load_state_dict({n: e + 1 for n, e in block.state_dict().items()}, assign=True),
    "another dtype": lambda block: block.to(torch.bfloat16),
}


def assert_follows(compiled: Callable[[Tensor], object], block: Block, x: Tensor, way: str) -> None:
    x = x.to(block.down.bias.dtype)
    expected = block(x)
    # In 16 bits, each rounds other inner values, and sums of both signs magnify that.
    rounding = {"rtol": 0, "atol": 0.03 * max(float(each.abs().max()) for each in expected)}
    torch.testing.assert_close(
        compiled(x),
        expected,
        msg=lambda problem: f"{way}: {problem}",
        **(rounding if x.dtype == torch.bfloat16 else {}),
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_way_to_change_a_weight(
    mode: Callable[[], torch.inference_mode], cpu: hal.Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The ways are applied in turn, to a model whose projections are merged."""
    with mode():
        block, x = Block(), torch.randn(3, 8)
        kept = list(block.parameters())
        compiled = torch.compile(block, backend="hal")
        assert_follows(compiled, block, x, "none")
        assert "merge_projections: applied at 2 sites" in caplog.text
        for group in [(block.gate.weight, block.up.weight), (block.first.bias, block.second.bias)]:
            assert concatenated(group) is not None
        assert all(one is other for one, other in zip(kept, block.parameters(), strict=True))
        for parameter in block.parameters():
            parameter.grad = torch.ones_like(parameter)
        for way, change in (*WAYS.items(), ("a file", lambda block: replaced_by_a_file(block, tmp_path))):
            before = block(x.to(block.down.bias.dtype))
            change(block)
            assert_follows(compiled, block, x, way)
            if way != "another dtype":
                after = block(x.to(block.down.bias.dtype))
                assert not all(torch.allclose(one, other) for one, other in zip(before, after, strict=True)), way


def test_weights_that_are_replaced_run_without_merging(cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
    block, x = Block(), torch.randn(3, 8)
    compiled = torch.compile(block, backend="hal")
    with torch.no_grad():
        compiled(x)
        other = block.gate.weight.data = block.gate.weight.data.clone()
        for _ in range(2):
            other.add_(1)
            assert_follows(compiled, block, x, "data = other")
    assert caplog.text.count("the weights of merged projections were replaced") == 1
    assert "torch.compiler.reset()" in caplog.text


def test_replaced_weights_are_freed(cpu: hal.Backend) -> None:
    block, x = Block(), torch.randn(3, 8)
    compiled = torch.compile(block, backend="hal")
    with torch.no_grad():
        compiled(x)
        storages = [StorageWeakRef(each.untyped_storage()) for each in block.parameters()]
        block.load_state_dict({name: each + 1 for name, each in block.state_dict().items()}, assign=True)
        assert_follows(compiled, block, x, "assigned")
    gc.collect()
    assert all(each.expired() for each in storages)


@pytest.mark.parametrize("shared", ["state_dict", "share_memory", "tied"])
def test_aliases_from_before_the_first_call(shared: str, cpu: hal.Backend, caplog: pytest.LogCaptureFixture) -> None:
    block, x = Block(), torch.randn(3, 8)
    if shared == "share_memory":
        block.share_memory()
    if shared == "tied":
        block.up.weight.data = block.gate.weight.data
    alias = block.state_dict()["gate.weight"] if shared == "state_dict" else block.gate.weight.data
    compiled = torch.compile(block, backend="hal")
    with torch.inference_mode():
        compiled(x)
        alias.add_(1)
        assert torch.equal(alias, block.gate.weight)
        if shared == "share_memory":
            written_by_another_process(block)
        assert_follows(compiled, block, x, shared)
    assert "stay apart" in caplog.text


def from_numpy() -> Tensor:
    return torch.from_numpy(torch.randn(4, 4).numpy())


OWNED_ELSEWHERE: dict[str, tuple[Callable[[], tuple[Tensor, object]], str]] = {
    "a view": (lambda: (torch.randn(8, 4)[:4], None), "part of another"),
    "not contiguous": (lambda: (torch.randn(4, 4).t(), None), "not contiguous"),
    "numpy": (lambda: (from_numpy(), None), "numpy"),
    "dlpack": (lambda: (torch.from_dlpack(torch.randn(4, 4)), None), "another library"),
    "shared": (lambda: (torch.randn(4, 4).share_memory_(), None), "other processes"),
    "an alias": (lambda: ((made := torch.randn(4, 4)), made.detach()), "another tensor shares"),
    "exported": (lambda: ((made := torch.randn(4, 4)), torch.utils.dlpack.to_dlpack(made)), "another tensor shares"),
    "its storage": (lambda: ((made := torch.randn(4, 4)), made.untyped_storage()), "another tensor shares"),
}


@pytest.mark.parametrize("kind", OWNED_ELSEWHERE)
def test_a_weight_that_something_else_can_write_is_not_moved(kind: str) -> None:
    make, reason = OWNED_ELSEWHERE[kind]
    tensor, alias = make()
    weights = [nn.Parameter(tensor), nn.Parameter(torch.randn(4, 4))]
    del tensor
    assert reason in str(why_not_moved(weights))
    assert concatenated(weights) is None
    del alias


def test_a_weight_of_a_mapped_file_is_not_moved(tmp_path: Path) -> None:
    save_file({"one": torch.randn(4, 4), "two": torch.randn(4, 4)}, tmp_path / "two.safetensors")
    weights = [nn.Parameter(each) for each in load_file(tmp_path / "two.safetensors").values()]
    assert "file" in str(why_not_moved(weights))


@pytest.mark.parametrize("inference", [False, True])
def test_moved_weights_stay_what_they_were(inference: bool, tmp_path: Path) -> None:
    with torch.inference_mode(inference):
        block = Block()
    before, weights = copy.deepcopy(block.state_dict()), [block.first.weight, block.second.weight]
    assert why_not_moved(weights) is None
    move_together(weights)
    assert concatenated(weights) is not None
    assert [each.is_inference() for each in weights] == [inference] * 2
    assert all(each.requires_grad for each in weights)
    save_file(block.state_dict(), tmp_path / "block.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "block.safetensors"), dict(before))
    torch.save(block.state_dict(), tmp_path / "block.pt")
    torch.testing.assert_close(torch.load(tmp_path / "block.pt"), before)
    if not inference:
        block(torch.randn(3, 8))[1].sum().backward()
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
        optimizer.step()
        assert not torch.equal(block.second.weight, before["second.weight"])
        torch.testing.assert_close(concatenated(weights), torch.cat([each.detach() for each in weights]))


class Writing(nn.Module):
    """A model that writes a weight before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, False), nn.Linear(4, 4, False)

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.mul_(0.5)
        return self.first(x) + self.second(x)  # type: ignore[no-any-return]


def test_a_weight_that_the_graph_writes(cpu: hal.Backend) -> None:
    model, x = Writing(), torch.randn(3, 4)
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="hal")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), other(x))


class Scaled(nn.Module):
    """A model in which a value depends on weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.weight) + self.table.cos()


def test_what_depends_on_weights_alone_is_no_constant(cpu: hal.Backend) -> None:
    model, x = Scaled(), torch.randn(3, 4)
    with torch.inference_mode():
        compiled = torch.compile(model, backend="hal")
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
            model.weight.data.add_(1)
            model.table.add_(1)
