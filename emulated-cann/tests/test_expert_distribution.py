"""Tests of the dispatch of tokens to the ranks of their experts, and of the combine of the results (MC2)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch_npu
from emulated_cann import control, tracing
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough
from support.children import on_soc
from support.device_ranks import two_ranks
from support.refusals import check_refused
from torch import Tensor

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import hccl  # noqa: E402

HIDDEN, EXPERTS, CHOICES = 64, 6, 2
LOCAL = EXPERTS // 2
INT32 = torch.int32
Asked = list["Tokens"]


@attrs.frozen
class Tokens:
    """A rank's tokens: values, chosen experts, weights, and which choices take part."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    active: Tensor

    @classmethod
    def draw(cls, rank: int, count: int, seed: int, dtype: torch.dtype = torch.float16, most: int = EXPERTS) -> Tokens:
        """Draw tokens that choose among the first ``most`` experts."""
        generator = torch.Generator().manual_seed(100 * seed + rank)
        ids = torch.stack([torch.randperm(most, generator=generator)[:CHOICES] for _ in range(count)])
        x, weights = torch.randn(count, HIDDEN, generator=generator), torch.rand(count, CHOICES, generator=generator)
        return cls(x.to(dtype), ids.to(INT32), weights, torch.ones(count, CHOICES, dtype=torch.bool))

    def sent_to(self, expert: int) -> list[tuple[int, int]]:
        """The tokens that choose an expert, and which of their choices it is."""
        return [(int(t), int(k)) for t, k in ((self.ids == expert) & self.active).nonzero()]


def received(asked: Asked, rank: int) -> list[tuple[int, int, int, int]]:
    """A rank's rows in order: expert, source, token and choice of each."""
    local = range(rank * LOCAL, (rank + 1) * LOCAL)
    return [(e, s, t, k) for e in local for s, of in enumerate(asked) for t, k in of.sent_to(e)]


class Device:
    """One rank's calls, with its tensors on its device."""

    def __init__(self, of: hccl.Communicator, tokens: Tokens, mask: str | None = None, **options: Any) -> None:
        self.rank, self.tokens, self.device = of.rank, tokens, f"npu:{of.device}"
        self.x, self.ids, self.weights = (each.to(self.device) for each in (tokens.x, tokens.ids, tokens.weights))
        masks = {"tokens": tokens.active[:, 0], "choices": tokens.active}
        self.mask = masks[mask].contiguous().to(self.device) if mask else None
        self.group = {
            "group_ep": of.name,
            "ep_world_size": of.ranks,
            "ep_rank_id": of.rank,
            "moe_expert_num": EXPERTS,
            "global_bs": options.pop("global_bs", 0),
            "x_active_mask": self.mask,
        }
        self.options = options

    def dispatch(self) -> tuple[Tensor, ...]:
        return torch_npu.npu_moe_distribute_dispatch_v2(self.x, self.ids, **self.group, **self.options)

    def combine(self, rows: Tensor, sent: tuple[Tensor, ...], **options: Any) -> Tensor:
        return torch_npu.npu_moe_distribute_combine_v2(
            rows, self.ids, sent[2], sent[4], self.weights, **self.group, **options
        )


def on_all(devices: list[Device], call: Callable[[Device], Any]) -> list[Any]:
    results = []
    for each in devices:
        with torch.npu.device(each.device):
            results.append(call(each))
    for each in devices:
        torch.npu.synchronize(each.device)
    return results


def scaled(rows: Tensor, experts: list[int]) -> Tensor:
    """Multiply each row by the number of its expert plus one, in place of the expert's network."""
    factors = torch.tensor([expert + 1 for expert in experts], dtype=rows.dtype, device=rows.device)
    return torch.cat([rows[: len(experts)] * factors.unsqueeze(1), rows[len(experts) :]])


def combined(tokens: Tokens) -> Tensor:
    """The weighted sum of the results of a token's experts, in float32, rounded once."""
    total = torch.zeros(tokens.x.shape)
    for choice in range(CHOICES):
        result = (tokens.x * (tokens.ids[:, choice, None] + 1).to(tokens.x.dtype)).float()
        total += result * tokens.weights[:, choice, None] * tokens.active[:, choice, None]
    return total.to(tokens.x.dtype)


def check_dispatch(asked: Asked, rank: int, found: tuple[Tensor, ...], prefix: bool = False) -> None:
    due = received(asked, rank)
    rows = [asked[source].x[token] for _, source, token, _ in due]
    assert torch.equal(found[0][: len(due)].cpu(), torch.stack(rows) if rows else asked[0].x[:0])
    counts = torch.tensor([sum(e == rank * LOCAL + each for e, *_ in due) for each in range(LOCAL)])
    assert torch.equal(found[3].cpu(), counts.cumsum(0) if prefix else counts)
    blocks = [(rank * LOCAL + each, source) for each in range(LOCAL) for source in range(len(asked))]
    ends = torch.tensor([sum((e, s) == block for e, s, *_ in due) for block in blocks]).cumsum(0)
    assert torch.equal(found[4].cpu(), ends.to(INT32))


def check_both(pair: list[hccl.Communicator], asked: Asked, mask: str | None = None, **options: Any) -> None:
    devices = [Device(of, tokens, mask, **options) for of, tokens in zip(pair, asked, strict=True)]
    sent = on_all(devices, Device.dispatch)
    for rank, each in enumerate(sent):
        check_dispatch(asked, rank, each, options.get("expert_token_nums_type") == 0)

    def back(device: Device) -> Tensor:
        experts = [expert for expert, *_ in received(asked, device.rank)]
        return device.combine(scaled(sent[device.rank][0], experts), sent[device.rank])

    for tokens, found in zip(asked, on_all(devices, back), strict=True):
        takes_part = tokens.active.any(1)
        torch.testing.assert_close(found.cpu()[takes_part], combined(tokens)[takes_part], rtol=0, atol=0)


@thorough(EXHAUSTIVE, r"\[dtype\d-[1-4]")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_there_and_back(pair: list[hccl.Communicator], dtype: torch.dtype, seed: int) -> None:
    asked = [Tokens.draw(rank, 5, seed, dtype) for rank in range(2)]
    check_both(pair, asked, expert_token_nums_type=seed % 2)


@pytest.mark.parametrize("most", [2, 3, 4])
def test_some_experts_have_no_tokens(pair: list[hccl.Communicator], most: int) -> None:
    """With 3 or fewer experts chosen, rank 1 gets no token at all."""
    check_both(pair, [Tokens.draw(rank, 4, 9, most=most) for rank in range(2)])


def test_ranks_with_different_numbers_of_tokens(pair: list[hccl.Communicator]) -> None:
    check_both(pair, [Tokens.draw(0, 7, 3), Tokens.draw(1, 1, 3)], global_bs=14)


@pytest.mark.parametrize("mask", ["tokens", "choices"])
def test_masked(pair: list[hccl.Communicator], mask: str) -> None:
    asked = []
    for rank in range(2):
        tokens = Tokens.draw(rank, 6, 4)
        active = torch.zeros_like(tokens.active)
        if mask == "tokens":
            active[: 2 + 3 * rank] = True
        else:
            active[0], active[2, 1], active[5, 0] = True, True, rank == 0
        asked.append(attrs.evolve(tokens, active=active))
    check_both(pair, asked, mask)


def test_no_token_of_a_rank_takes_part(pair: list[hccl.Communicator]) -> None:
    asked = [Tokens.draw(rank, 3, 4) for rank in range(2)]
    asked[1] = attrs.evolve(asked[1], active=torch.zeros_like(asked[1].active))
    check_both(pair, asked, "tokens")


@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_quantization(pair: list[hccl.Communicator], smooth: bool) -> None:
    asked = [Tokens.draw(rank, 5, 6) for rank in range(2)]
    factors = torch.rand(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5
    devices = [Device(of, tokens, quant_mode=2) for of, tokens in zip(pair, asked, strict=True)]
    for each in devices:
        if smooth:
            each.options["scales"] = factors.to(each.device)
    for rank, (rows, scales, *_) in enumerate(on_all(devices, Device.dispatch)):
        due = received(asked, rank)
        assert rows.dtype == torch.int8
        assert scales.dtype == torch.float32
        for index, (expert, source, token, _) in enumerate(due):
            value = asked[source].x[token].float() * (factors[expert] if smooth else 1)
            scale = value.abs().max() / 127
            torch.testing.assert_close(scales[index].cpu(), scale)
            assert (rows[index].cpu() - (value / scale).round()).abs().max() <= 1


def test_weights_travel_with_their_tokens(pair: list[hccl.Communicator]) -> None:
    asked = [Tokens.draw(rank, 5, 7) for rank in range(2)]
    devices = [Device(of, tokens) for of, tokens in zip(pair, asked, strict=True)]
    for each in devices:
        each.options["expert_scales"] = each.weights
    for rank, found in enumerate(on_all(devices, Device.dispatch)):
        due = [asked[source].weights[token, choice] for _, source, token, choice in received(asked, rank)]
        assert torch.equal(found[6][: len(due)].cpu(), torch.stack(due))


def test_in_graphs_with_other_values(pair: list[hccl.Communicator]) -> None:
    """One graph holds dispatch, experts and combine. Other tokens choose other experts at each replay."""
    devices = [Device(of, Tokens.draw(of.rank, 5, 0)) for of in pair]
    factors, held = [], []
    for device in devices:
        with torch.npu.device(device.device):
            factors.append(torch.ones(10 * CHOICES, 1, dtype=torch.float16, device=device.device))
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph, stream=torch.npu.Stream(device.device)):
                sent = device.dispatch()
                result = device.combine(sent[0] * factors[-1], sent)
            held.append((graph, sent, result))
    for seed in (1, 2, 3):
        asked = [Tokens.draw(of.rank, 5, seed, most=EXPERTS - seed) for of in pair]
        for device, tokens, (graph, _, _), factor in zip(devices, asked, held, factors, strict=True):
            with torch.npu.device(device.device):
                device.x.copy_(tokens.x)
                device.ids.copy_(tokens.ids)
                device.weights.copy_(tokens.weights)
                experts = [expert + 1 for expert, *_ in received(asked, device.rank)]
                factor[: len(experts)] = torch.tensor(experts, dtype=torch.float16).unsqueeze(1).to(device.device)
                graph.replay()
        for rank, (tokens, (_, sent, result)) in enumerate(zip(asked, held, strict=True)):
            check_dispatch(asked, rank, sent)
            torch.testing.assert_close(result.cpu(), combined(tokens), rtol=0, atol=0)


@thorough(EXHAUSTIVE, r"\[[1-3]")
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule(pair: list[hccl.Communicator], seed: int) -> None:
    with control.schedule(seed):
        check_both(pair, [Tokens.draw(rank, 4, seed) for rank in range(2)])


def test_the_trace(pair: list[hccl.Communicator]) -> None:
    with tracing.trace() as trace:
        check_both(pair, [Tokens.draw(rank, 4, 0) for rank in range(2)])
    for name in ("MoeDistributeDispatchV4", "MoeDistributeCombineV4"):
        found = [(each.device, each.rank, each.ranks) for each in trace.ran() if each.name == name]
        assert sorted(found) == [(0, 0, 2), (1, 1, 2)]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"group_ep": "nobody"}, "HCCL has no communicator nobody"),
    ({"ep_world_size": 3, "ep_rank_id": 0}, "ep_world_size must be the number of ranks of the group, 2, but is 3"),
    ({"ep_rank_id": 1}, "ep_rank_id must be this rank's number in the group, 0, but is 1"),
    ({"moe_expert_num": 5}, "moe_expert_num must be a multiple of the number of ranks, 2, and at most 1024, but is 5"),
    ({"tp_world_size": 2}, "tp_world_size must be 0 or 1, but is 2"),
    ({"comm_alg": "fullmesh_v1"}, "comm_alg must be empty, fullmesh on Atlas A2, .* but is fullmesh_v1"),
    ({"comm_alg": "hierarchy"}, "comm_alg hierarchy, and the variables that select it, are not emulated"),
    ({"shared_expert_num": 2, "shared_expert_rank_num": 0}, "shared_expert_num"),
    ({"zero_expert_num": 1}, "zero, copy and constant experts are not emulated"),
    ({"quant_mode": 1}, "quant_mode must be 0 or 2, but is 1"),
    ({"scales": torch.ones(EXPERTS, HIDDEN)}, "scales require quant_mode 2"),
    ({"scales": torch.ones(2, HIDDEN), "quant_mode": 2}, r"scales must have shape \[6, 64\], but has \[2, 64\]"),
    ({"global_bs": 6}, "global_bs must be 0, or .* which is at least 8, but is 6"),
    ({"x": torch.ones(4, 40, dtype=torch.float16)}, "H must be a multiple of 32 and at most 10240 on Atlas A2"),
    ({"x": torch.ones(4, HIDDEN)}, "x must be float16 or bfloat16, not Float"),
    ({"x_active_mask": torch.ones(3, dtype=torch.bool)}, r"x_active_mask must be \[BS\] or \[BS, K\]"),
    ({"expert_ids": torch.zeros(4, 7, dtype=INT32)}, "expert_ids must have 1 to 6 columns, but has 7"),
    ({"expert_scales": torch.ones(4, 3)}, r"expert_scales must have shape \[4, 2\], but has \[4, 3\]"),
    (
        {"expert_ids": torch.zeros(257, 2, dtype=INT32), "x": torch.ones(257, HIDDEN, dtype=torch.float16)},
        "at least 1 token and at most 256, but there are 257",
    ),
    (
        {
            "expert_ids": torch.zeros(256, 6, dtype=INT32),
            "x": torch.ones(256, 10240, dtype=torch.float16),
            "moe_expert_num": 1024,
            "global_bs": 2 * 1024,
        },
        r"the buffer of the group must have at least 484 MiB, but has 200: set HCCL_BUFFSIZE",
    ),
]


def test_changed_dispatches_are_refused(pair: list[hccl.Communicator]) -> None:
    device = Device(pair[0], Tokens.draw(0, 4, 0))

    def dispatch(**changes: Any) -> None:
        moved = {key: value.npu() if isinstance(value, Tensor) else value for key, value in changes.items()}
        with torch.npu.device(0):
            torch_npu.npu_moe_distribute_dispatch_v2(
                **{"x": device.x, "expert_ids": device.ids, **device.group, **moved}
            )

    check_refused((dispatch, changes, reason) for changes, reason in REFUSED)


def test_codes_of_refusals(pair: list[hccl.Communicator]) -> None:
    device = Device(pair[0], Tokens.draw(0, 4, 0))
    device.group["ep_rank_id"] = 1
    with torch.npu.device(0), pytest.raises(RuntimeError, match="561002"):
        device.dispatch()
    device.group["ep_rank_id"], device.x = 0, device.x.float()
    with torch.npu.device(0), pytest.raises(RuntimeError, match="161002"):
        device.dispatch()


def failing(devices: list[Device], call: Callable[[Device], Any], capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Call a function on each device, and return the device errors."""
    for each in devices:
        with torch.npu.device(each.device):
            call(each)
    errors = []
    for each in devices:
        with pytest.raises(RuntimeError) as error:
            torch.npu.synchronize(each.device)
        errors.append(str(error.value))
    text = capfd.readouterr().err
    return [each + text for each in errors]


BEFORE: dict[str, tuple[Callable[[Device], None], str]] = {
    "global_bs": (lambda last: last.group.update(global_bs=16), "global_bs must be the same on all ranks, but is 8 on"),
    "experts": (lambda last: last.group.update(moe_expert_num=8), "moe_expert_num must be the same on all ranks, but"),
    "quant_mode": (
        lambda last: last.options.update(quant_mode=2),
        "rank 0 calls MoeDistributeDispatchV4 of 64 float16",
    ),
    "outside": (lambda last: last.ids[0, 0].fill_(EXPERTS), "expert_ids must be from 0 to 5, but has 6"),
    "twice": (lambda last: last.ids[0].fill_(1), "a token must not choose an expert twice"),
    "mask": (
        lambda last: last.group.update(x_active_mask=torch.tensor([True, False, True, True]).to(last.device)),
        "the tokens that x_active_mask selects must come before the others",
    ),
}
"""What changes on the last rank before the dispatch, and the error of both ranks."""
AFTER = {"combine and dispatch": "and rank 1 MoeDistributeCombineV4 of 64 float16"}
AFTER |= {"other counts": "rows come back: ep_send_counts", "falling counts": "must be the ep_recv_counts of"}
MASKED = "x_active_mask must select all tokens if ranks have different numbers"


def different(case: str, ranks: list[hccl.Communicator]) -> tuple[list[Device], Callable[[Device], Any], str]:
    if case == "masked and different":
        devices = [Device(of, Tokens.draw(of.rank, 4 - of.rank, 0), "tokens", global_bs=8) for of in ranks]
        devices[0].group["x_active_mask"][3] = False
        return devices, Device.dispatch, MASKED
    devices = [Device(of, Tokens.draw(of.rank, 4, 0)) for of in ranks]
    if case in BEFORE:
        change, reason = BEFORE[case]
        change(devices[1])
        return devices, Device.dispatch, reason
    sent = on_all(devices, Device.dispatch)
    if case == "combine and dispatch":
        act = {0: Device.dispatch, 1: lambda each: each.combine(sent[1][0], sent[1])}
        return devices, lambda each: act[each.rank](each), AFTER[case]
    sent[1][4].mul_(0 if case == "other counts" else -1)
    return devices, lambda each: each.combine(sent[each.rank][0], sent[each.rank]), AFTER[case]


@pytest.mark.parametrize("case", [*BEFORE, *AFTER, "masked and different"])
def test_a_difference_is_an_error_on_every_rank(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = two_ranks()
    devices, call, reason = different(case, ranks)
    errors = failing(devices, call, capfd)
    assert all(reason in each for each in errors), errors
    for each in ranks:
        each.destroy()


def test_the_information_of_another_dispatch(pair: list[hccl.Communicator]) -> None:
    """On one rank only: the other may have its result before."""
    ranks = two_ranks()
    devices = [Device(of, Tokens.draw(of.rank, 4, 0)) for of in ranks]
    sent = on_all(devices, Device.dispatch)
    for each in sent:
        each[2].add_(1)
    for each in devices:
        with torch.npu.device(each.device):
            each.combine(sent[each.rank][0], sent[each.rank])
    errors = 0
    for each in devices:
        try:
            torch.npu.synchronize(each.device)
        except RuntimeError:
            errors += 1
    assert errors
    for of in ranks:
        of.destroy()


def test_their_group_is_for_nothing_else() -> None:
    ranks, others = two_ranks(), two_ranks()
    devices = [Device(of, Tokens.draw(of.rank, 4, 0)) for of in ranks]
    on_all(devices, Device.dispatch)
    values = [hccl.Buffer(np.zeros(4, np.float32)) for _ in others]
    with pytest.raises(hccl.Failed, match=r"HcclAllReduce: the group .* is used for the dispatch and combine of"):
        ranks[0].all_reduce(values[0], values[0], 4)
    with pytest.raises(hccl.Failed, match=r"HcclSend: the group .* is used for the dispatch and combine of"):
        ranks[0].send(values[0], 4, 1)
    others[0].barrier()
    device = Device(others[0], Tokens.draw(0, 4, 0))
    with torch.npu.device(0), pytest.raises(RuntimeError, match="is used for other operations: dispatch and combine"):
        device.dispatch()
    others[1].barrier()
    for each in (*ranks, *others):
        each.destroy()


OTHER_SOCS = """
import sys
import torch, torch_npu
sys.path.insert(0, sys.argv[1])
import hccl

first = "first" in sys.argv
torch.npu.set_device(0)
ranks = hccl.of_devices(range(8 if first else 2))
hccl.cann.aclrtSetDevice(0)
H, K = (7168, 4) if first else (1024, 2)
group = lambda of: {"group_ep": of.name, "ep_world_size": of.ranks, "ep_rank_id": of.rank, "moe_expert_num": 16}
version = "" if first else "_v2"
dispatch, combine = (getattr(torch_npu, f"npu_moe_distribute_{name}{version}") for name in ("dispatch", "combine"))
held, extra = [], {}
for of in ranks:
    with torch.npu.device(of.device):
        generator = torch.Generator().manual_seed(of.rank)
        x = torch.randn(3, H, generator=generator).half()
        ids = torch.stack([torch.randperm(16, generator=generator)[:K] for _ in range(3)]).int().npu()
        weights = torch.rand(3, K, generator=generator)
        if not first:
            extra = {"shared_expert_x": torch.ones(3, H, dtype=torch.float16).npu()}
        sent = dispatch(x.npu(), ids, **group(of))
        held.append((x, ids, weights, sent, extra, group(of)))
results = []
for of, (x, ids, weights, sent, extra, options) in zip(ranks, held):
    with torch.npu.device(of.device):
        out = combine(sent[0], ids, sent[2], sent[4], weights.npu(), **options, **extra)
        results.append((out, x.float() * weights.sum(1, keepdim=True) + (0 if first else 1)))
for of, (out, due) in zip(ranks, results):
    torch.npu.synchronize(of.device)
    torch.testing.assert_close(out.cpu().float(), due, rtol=2e-3, atol=4e-3)
print("well")
"""


@thorough(PROCESSES)
@pytest.mark.parametrize(
    ("soc", "which"), [("Ascend910_9391", "second"), ("Ascend910_9391", "first"), ("Ascend950PR_9599", "second")]
)
def test_on_other_products(clean: dict[str, str], soc: str, which: str) -> None:
    """On these a shared expert's result is added. The interface without a version needs 8 ranks."""
    assert on_soc(soc, OTHER_SOCS, clean, str(SCRIPTS), which, devices=8) == "well\n"
