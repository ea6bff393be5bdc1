"""hal's router in the place of transformers', where it computes the same."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hal import ops
from hal.nn import Choice, Weight, expert_weights, used_experts

CORRECTION = "e_score_correction_bias"
"""The correction that chooses experts: a tensor of the router, or an argument of it."""


class Router(nn.Module):
    """A projection to the scores of experts and :func:`hal.ops.topk_route`, as transformers' routers return them.

    Args:
        tensors: ``weight``, and ``bias`` and the correction if it has them, each with its name in the checkpoint and
            transformers' tensor on the meta device.
        wide: whether the scores are computed in float32.
        wide_weights: whether the weights stay in float32; else they have the dtype of the tokens.
        options: of the operation.
    """

    kept_choice: str | None = None
    weight: nn.Parameter
    bias: Tensor | None
    e_score_correction_bias: Tensor | None

    def __init__(
        self, tensors: Mapping[str, tuple[str, Tensor]], wide: bool, wide_weights: bool, options: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._wide, self._wide_weights, self._options = wide, wide_weights, dict(options)
        self._names = {own: name for own, (name, _) in tensors.items()}
        for own in ("weight", "bias", CORRECTION):
            _, tensor = tensors.get(own, ("", None))
            if isinstance(tensor, nn.Parameter) or own == "weight":
                empty = None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                self.register_parameter(own, None if empty is None else nn.Parameter(empty, requires_grad=False))
            else:
                self.register_buffer(own, tensor)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        declared = {}
        for own, name in self._names.items():
            dims = getattr(self, own).dim()
            axes = "num_experts in_features" if own == "weight" else "one num_experts" if dims == 2 else "num_experts"
            dtype = torch.float32 if self._wide or own == CORRECTION else None
            declared[own] = Weight((name,), axes, dtype=dtype)
        return declared

    @property
    def chooses(self) -> Choice:
        """What is recorded and replayed of it."""
        return Choice("experts", (self._options["top_k"],), self.weight.shape[0])

    def forward(self, hidden: Tensor, e_score_correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits, the weights and the experts of each token."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = ops.linear(rows.to(self.weight.dtype), self.weight, self.bias)
        bias = self.e_score_correction_bias if e_score_correction_bias is None else e_score_correction_bias
        scores = logits.float() if self._wide_weights else logits
        weights, own = ops.topk_route(scores, None if bias is None else bias.flatten().float(), **self._options)
        options = {name: self._options[name] for name in ("sigmoid", "renormalize", "scale")}
        weights, experts = used_experts(self, weights, own, lambda given: expert_weights(scores, given, **options))
        return logits, weights if self._wide_weights else weights.to(hidden.dtype), experts


def router_of(module: Any) -> Router | None:
    """Return hal's router that computes what a layer does, or None."""
    if not isinstance(top_k := getattr(module, "top_k", None), int) or (tensors := _tensors(module)) is None:
        return None
    experts, hidden = tensors["weight"][1].shape
    if not 1 <= top_k <= experts:
        return None
    asks = CORRECTION in inspect.signature(module.forward).parameters
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        drawn = {
            own: torch.randn(tensor.shape, generator=generator) * (hidden**-0.5 if own == "weight" else 0.3)
            for own, (_, tensor) in tensors.items()
        }
        given = {tensors[own][0]: each for own, each in drawn.items()}
        correction = 0.3 * torch.randn(experts, generator=generator) if asks else drawn.get(CORRECTION)
        x = torch.randn(7, hidden, generator=generator)
        try:
            _, weights, chosen = functional_call(module, given, (x, correction) if asks else (x,))
        except Exception:  # A router of another form may raise anything.
            return None
        wanted = _dense(weights, chosen, experts)
        if wanted is None:
            return None
        logits = nn.functional.linear(x, drawn["weight"], drawn.get("bias"))
        bias = None if correction is None else correction.flatten()
        for options in _routings(module, top_k):
            weights, chosen = ops.operation("topk_route").body(logits, bias, **options)
            found = _dense(weights, chosen, experts)
            if found is not None and torch.allclose(found, wanted, 1e-4, 1e-5):
                wide = tensors["weight"][1].dtype is torch.float32
                narrow = {name: each if CORRECTION in name else each.bfloat16() for name, each in given.items()}
                arguments = (x.bfloat16(), correction) if asks else (x.bfloat16(),)
                scores, weights = _in_float32(module, narrow, arguments)
                return Router(tensors, wide and scores, weights, options)
    return None


def _tensors(module: Any) -> dict[str, tuple[str, Tensor]] | None:
    """Return the tensors of a router, by what they are: a weight, a bias and a correction; None if it has others."""
    found: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        last = name.rpartition(".")[2]
        if last not in ("weight", "bias", CORRECTION) or last in found:
            return None
        found[last] = name, tensor
    weight = found.get("weight", ("", None))[1]
    if weight is None or weight.dim() != 2:
        return None
    alike = all(each.numel() == weight.shape[0] for own, (_, each) in found.items() if own != "weight")
    return found if alike else None


def _in_float32(module: Any, given: Mapping[str, Tensor], arguments: tuple[Any, ...]) -> tuple[bool, bool]:
    """Return whether a router computes its scores, and its weights, in float32 whatever the dtype of its input."""
    try:
        logits, weights, _ = functional_call(module, dict(given), arguments)
    except Exception:  # It may need all in one dtype.
        return False, False
    # Those in 16 bits that it widens afterwards are none.
    scores, weights = (
        each.dtype is torch.float32 and not torch.equal(each, each.bfloat16().float()) for each in (logits, weights)
    )
    return scores, weights


def _dense(weights: Any, chosen: Any, experts: int) -> Tensor | None:
    """Return the weights by expert, ``[tokens, num_experts]``; None if these are no weights of chosen experts."""
    if not (isinstance(weights, Tensor) and isinstance(chosen, Tensor) and weights.shape == chosen.shape):
        return None
    if weights.dim() != 2 or chosen.is_floating_point() or not weights.is_floating_point():
        return None
    return torch.zeros(weights.shape[0], experts).scatter(1, chosen.long(), weights.float())


def _routings(module: Any, top_k: int) -> Iterator[dict[str, Any]]:
    """Yield the options of the operation that may fit a router."""
    scale = getattr(module, "routed_scaling_factor", 1.0)
    groups = getattr(module, "num_group", None) or getattr(module, "n_group", None) or 1
    kept = getattr(module, "topk_group", None) or 1
    sizes = {(1, 1, 1), *((groups, kept, best) for best in (1, 2) if groups > 1)}
    for sigmoid, renormalize, factor, (num_groups, top_groups, best) in itertools.product(
        (False, True), (True, False), dict.fromkeys((float(scale), 1.0)), sorted(sizes, reverse=True)
    ):
        yield {
            "top_k": top_k,
            "sigmoid": sigmoid,
            "renormalize": renormalize,
            "scale": factor,
            "num_groups": num_groups,
            "top_groups": top_groups,
            "group_best": best,
        }
