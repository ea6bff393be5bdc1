"""The selection of hal for one model of transformers, and its undoing."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

import hal
from hal import ops
from hal.engines.transformers.attention import PAGED, PAGED_ATTENTION, ServedLayers, attend
from hal.errors import BackendNotActive, OperationError

NAME = "hal"
"""The name of hal's functions in transformers' registries."""
EXPERTS = ("MixtralExperts", "Qwen2MoeExperts", "Qwen3MoeExperts")
"""The classes of experts that hal computes: gate and up in halves, SiLU, and no bias."""


@attrs.define
class Usage:
    """What :func:`use` changed in a model. As a context manager, it restores the model at the end.

    Attributes:
        replaced: what hal computes: ``attention``, ``paged attention``, ``experts``.
    """

    _model: Any
    _attention: str
    _experts: Any
    _paged: ServedLayers | None = None
    replaced: tuple[str, ...] = ()

    def restore(self) -> None:
        """Select what the model used before. If a part fails, the others are restored, too."""
        with ExitStack() as parts:
            parts.callback(self._model.set_attn_implementation, self._attention)
            if self._experts is not None:
                parts.callback(self._model.set_experts_implementation, self._experts)
            if self._paged is not None:
                parts.callback(PAGED_ATTENTION.remove, self._paged)
        self.replaced = ()

    def __enter__(self) -> Usage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def use(model: Any, *, attention: bool = True, experts: bool = True, continuous_batching: bool = False) -> Usage:
    """Let a model of transformers call hal's operations, where transformers has a registry for them.

    The model's weights stay as they are. Attention is selected through ``AttentionInterface``, experts through
    ``ExpertsInterface``.

    Args:
        model: a ``PreTrainedModel``, on the device of the active backend.
        attention: whether hal computes attention.
        experts: whether hal computes mixtures of experts.
        continuous_batching: whether attention is that of ``generate_batch``, over its paged cache. The model's other
            methods cannot be called meanwhile: transformers' cache is then paged.

    Returns:
        A context manager that restores the model.

    Raises:
        BackendNotActive: no backend is open.
        OperationError: the model has experts of another form, or nothing that hal could compute.
        Exception: as transformers' ``set_attn_implementation`` and ``set_experts_implementation``, with the model
            restored.
    """
    if hal.active_backend() is None:
        raise BackendNotActive("hal.engines.transformers.use needs an open backend", "call hal.open() before")
    mixtures = [each for each in model.modules() if hasattr(each, "gate_up_proj") and hasattr(each, "has_gate")]
    strange = sorted({type(each).__name__ for each in mixtures} - set(EXPERTS)) if experts else []
    if strange:
        raise OperationError(
            f"hal does not compute the experts {', '.join(strange)}; it computes {', '.join(EXPERTS)}",
            "use(model, experts=False) leaves them to transformers",
        )
    if not attention and not (experts and mixtures):
        raise OperationError("use was called with nothing to replace", "leave attention or experts at True")
    usage = Usage(model, model.config._attn_implementation, model.get_experts_implementation() if mixtures else None)
    with ExitStack() as undo:
        undo.callback(usage.restore)  # transformers may refuse the model.
        if attention and continuous_batching:
            usage._paged = PAGED_ATTENTION.add(model)
            model.set_attn_implementation(PAGED)
            usage.replaced += ("paged attention",)
        elif attention:
            AttentionInterface.register(NAME, attend)
            AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
            model.set_attn_implementation(NAME)
            usage.replaced += ("attention",)
        if experts and mixtures:
            ExpertsInterface.register(NAME, compute_experts)
            model.set_experts_implementation(NAME)
            usage.replaced += ("experts",)
        undo.pop_all()
    return usage


def compute_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of a layer with :func:`hal.ops.expert_mlp`.

    Args:
        module: holds ``gate_up_proj`` ``[num_experts, 2 * width, hidden]`` and ``down_proj``.
        hidden_states: ``[tokens, hidden]``.
        top_k_index: ``[tokens, top_k]``, int64.
        top_k_weights: ``[tokens, top_k]``, floating.
    """
    if type(module.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        raise OperationError(
            f"{type(module).__name__} has the activation {module.act_fn}, and hal computes SiLU",
            "use(model, experts=False) leaves experts to transformers",
        )
    weights = top_k_weights if top_k_weights.dtype is torch.float32 else top_k_weights.to(hidden_states.dtype)
    projections = module.gate_up_proj, module.down_proj
    return ops.expert_mlp(hidden_states, *projections, weights, top_k_index.int(), None, None, ops.GatedActivation())
