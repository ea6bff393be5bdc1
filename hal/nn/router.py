"""The choice of experts for each token, and the MLP that consists of a router and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.errors import ConfigError
from hal.nn.choices import EXPERTS, Choice, chosen
from hal.nn.experts import Experts
from hal.nn.linear import Linear
from hal.nn.weights.weight import Weight
from hal.ops.experts.routing import SMALLEST_SUM

MAX_EXPERTS = 1 << 16
"""Each expert's tensors have names, which a damaged config must not multiply without limit."""


class Gate(Linear):
    """A small projection whose result routes or scales others, such as the scores of experts.

    It stays unquantized.

    Args:
        in_features: features of the input.
        out_features: features of the output.
        bias: whether it has a bias.
        dtype: the dtype of its tensors and of the computation, such as float32; None for the model's.
    """

    takes_adapters = False

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.dtype = dtype

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        declared = super().weights
        if self.dtype is None:
            return declared
        return {name: attrs.evolve(each, dtype=self.dtype, consumer=None) for name, each in declared.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``, in the gate's dtype."""
        return super().forward(x if self.dtype is None else x.to(self.dtype))

    if TYPE_CHECKING:
        __call__ = forward


class Router(Gate):
    """A gate whose results are the scores of experts; see :func:`hal.ops.topk_route`.

    Args:
        hidden_size: features of the input.
        num_experts: the number of experts.
        top_k: the number of experts per token.
        renormalize: whether the weights of a token add up to ``scale``.
        sigmoid: whether the scores are the sigmoid of the gate's results; their softmax otherwise.
        scale: the factor of the weights.
        groups: the number of groups of experts, and the number of those whose experts a token may take: the groups with
            the highest sums of their best scores.
        group_best: the number of these scores, 1 or 2.
        correction: whether the tensor ``e_score_correction_bias`` is added to the scores for the choice.
        bias: whether the gate has a bias.
        dtype: see :class:`Gate`.
        wide_weights: whether the weights of a token's experts stay in float32; else they have the tokens' dtype.

    Attributes:
        kept_choice: the name under which its experts are recorded or replayed; None for neither.
        e_score_correction_bias: ``[num_experts]``, or ``[1, num_experts]`` as in ERNIE, float32; or None.

    Raises:
        ConfigError: the numbers of experts or groups are out of range.
    """

    kept_choice: str | None = None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool,
        sigmoid: bool = False,
        scale: float = 1.0,
        groups: tuple[int, int] = (1, 1),
        group_best: int = 2,
        correction: bool = False,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        wide_weights: bool = False,
    ) -> None:
        if num_experts > MAX_EXPERTS:
            raise ConfigError(
                f"config.json has {num_experts} experts, more than {MAX_EXPERTS}", "correct the number of experts"
            )
        _check_groups(num_experts, *groups)
        allowed = num_experts // groups[0] * groups[1]
        if not 1 <= top_k <= allowed:
            raise ConfigError(
                f"config.json chooses {top_k} experts per token of {allowed}",
                f"correct num_experts_per_tok: it is from 1 to the number of experts, {allowed}",
            )
        super().__init__(hidden_size, num_experts, bias=bias, dtype=dtype)
        self.top_k, self.groups, self.factor = top_k, groups, scale
        self.group_best = group_best if groups[0] > 1 else 1
        self.renormalize, self.sigmoid, self.wide_weights = renormalize, sigmoid, wide_weights
        self.e_score_correction_bias: nn.Parameter | None
        values = nn.Parameter(torch.empty(num_experts), requires_grad=False) if correction else None
        self.register_parameter("e_score_correction_bias", values)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        name, axes = "e_score_correction_bias", "out_features"
        if self.e_score_correction_bias is not None and self.e_score_correction_bias.dim() > 1:
            axes = f"one {axes}"
        return {**super().weights, name: Weight((name,), axes, dtype=torch.float32)}

    @property
    def chooses(self) -> Choice:
        """What is recorded and replayed of it."""
        return Choice(EXPERTS, (self.top_k,), self.out_features)

    def choose(self, hidden: Tensor, *further: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of each token's experts.

        Args:
            hidden: ``[tokens, hidden_size]``.
            further: not read; a subclass may choose by it in :meth:`route`.

        Returns:
            ``[tokens, top_k]``, of hidden's dtype or float32, and ``[tokens, top_k]``, int32.
        """
        scores = self(hidden)
        weights, own = self.route(scores, *further)
        weights, experts = used_experts(self, weights, own, lambda given: self.weigh(scores, given))
        return weights if self.wide_weights else weights.to(hidden.dtype), experts

    def route(self, scores: Tensor, *further: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of each token's experts, given the gate's results.

        Args:
            scores: ``[tokens, num_experts]``.
            further: as of :meth:`choose`.
        """
        return ops.topk_route(
            scores.float() if self.wide_weights else scores,
            None if self.e_score_correction_bias is None else self.e_score_correction_bias.flatten(),
            self.top_k,
            self.sigmoid,
            self.renormalize,
            self.factor,
            *self.groups,
            self.group_best,
        )

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the weights of given experts, as :meth:`route` weighs those that it chooses.

        Args:
            scores: ``[tokens, num_experts]``.
            experts: ``[tokens, top_k]``, int32.
        """
        return expert_weights(scores, experts, sigmoid=self.sigmoid, renormalize=self.renormalize, scale=self.factor)


def expert_weights(scores: Tensor, experts: Tensor, *, sigmoid: bool, renormalize: bool, scale: float) -> Tensor:
    """Return the weights of given experts as :func:`hal.ops.topk_route` computes them, float32."""
    wide = scores.float()
    weights = (wide.sigmoid() if sigmoid else wide.softmax(-1)).gather(-1, experts.long())
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return weights * scale


def used_experts(
    layer: nn.Module, weights: Tensor, own: Tensor, weigh: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of the experts that a step uses: a layer's own, or those that it replays.

    Args:
        layer: declares what it chooses.
        weights: of its own experts, ``[tokens, top_k]``.
        own: their numbers, int32.
        weigh: returns the weights of others.
    """
    experts = chosen(layer, own)
    if experts is own:
        return weights, own
    same = (experts == own).all(-1, keepdim=True)  # These tokens have the bits of a step without a replay.
    return torch.where(same, weights, weigh(experts).to(weights.dtype)), experts


def _check_groups(num_experts: int, groups: int, taken: int) -> None:
    """Raise ConfigError unless experts have equal groups, of two or more if there are several."""
    if not 1 <= groups <= num_experts or num_experts % groups or (groups > 1 and num_experts < 2 * groups):
        raise ConfigError(
            f"config.json has {groups} groups of {num_experts} experts",
            "correct the number of groups: it divides the number of experts, and each has two or more",
        )
    if not 1 <= taken <= groups:
        raise ConfigError(
            f"config.json chooses {taken} groups of {groups}", f"correct the number: it is from 1 to {groups}"
        )


class SparseMLP(nn.Module):
    """A router and its experts: each token's results weighted by its scores.

    Args:
        gate: the router.
        width: features between an expert's projections.
        shared_experts: an MLP that every token takes too; None for none.
        shared_gate: whether the sigmoid of a gate, ``shared_expert_gate``, scales the results of that MLP.
        options: further arguments of :class:`Experts`.
    """

    def __init__(
        self,
        gate: Router,
        width: int,
        *,
        shared_experts: nn.Module | None = None,
        shared_gate: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.gate, self.shared_experts = gate, shared_experts
        self.experts = Experts(gate.out_features, gate.in_features, width, **options)
        self.shared_expert_gate = Gate(gate.in_features, 1) if shared_gate else None

    def forward(self, hidden: Tensor, *further: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape. The router gets further arguments, too."""
        routed = self.experts(hidden, *self.gate.choose(hidden, *further))
        if self.shared_experts is None:
            return routed
        shared: Tensor = self.shared_experts(hidden)
        if self.shared_expert_gate is not None:
            shared = ops.pointwise(self.shared_expert_gate(hidden), "sigmoid") * shared
        return routed + shared

    if TYPE_CHECKING:
        __call__ = forward
