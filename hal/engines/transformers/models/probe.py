"""The probe: what the layers of a model ask attention for, found by one call on meta tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import Cache

from hal import ops
from hal.engines.transformers.models.calls import PHASE, Call
from hal.errors import ConfigError
from hal.nn import Attention

REMEDY = "write a model for hal (docs/how-to/add-a-model-family.md), or run it with transformers"
UNSUPPORTED = (
    "position_bias",
    "attention_bias",
    "alibi",
    "head_mask",
    "layer_head_mask",
    "indices",
)
"""Arguments of an attention function that change its result, and that hal's operation does not have."""


@attrs.frozen
class Mask:
    """What a layer sees in place of a mask: what the mask says, or why hal cannot apply it."""

    window: int | None = None
    causal: bool = True
    problem: str | None = None

    def __getitem__(self, _: Any) -> Mask:
        return self  # Some models slice a mask.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError("attention is computed in the class, not by transformers' interface", REMEDY)

    def __radd__(self, _: Any) -> Any:
        return self.values


def mask(*, mask_function: Any, local_size: int | None = None, **_: Any) -> Mask:
    """Return what a mask function says; the function for ``AttentionMaskInterface``.

    The mask is compared with those that hal's operation has, on positions around multiples of the window.
    """
    if not isinstance(PHASE.get(), Probe):
        return Mask()  # The probe has read it.
    near = {max(0, turn * (local_size or 9) + offset) for turn in range(4) for offset in range(-3, 4)}
    points = torch.tensor(sorted(near), device="cpu")
    query, key, size = points[:, None], points[None], len(near)
    zero = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    try:
        seen = mask_function(zero, zero, query, key)
        seen = torch.as_tensor(seen, device="cpu").expand(size, size)
    except Exception as error:  # It may read tensors of the step, such as the segments of packed sequences.
        return Mask(problem=f"a mask that depends on the batch ({type(error).__name__})")
    causal = key <= query
    if torch.equal(seen, causal):
        return Mask()
    if local_size and torch.equal(seen, causal & (key > query - local_size)):
        return Mask(local_size)
    if local_size and torch.equal(seen, (query - key).abs() < local_size):
        return Mask(local_size, causal=False)
    if seen.all():
        return Mask(causal=False)
    return Mask(problem="another mask than a causal one, with or without a window")


class Probe:
    """Records the calls of attention, and refuses those that hal has no operation for.

    Attributes:
        calls: the calls, in order.
        layers: the attention of each.
        positions: of the tokens, ``[tokens, 1]``, without values.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.calls: list[Call] = []
        self.layers: list[Attention] = []
        self._seen: list[tuple[Tensor, Tensor]] = []

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Record a call."""
        head_dim = query.shape[-1]
        problems = [name for name in UNSUPPORTED if options.get(name) is not None]
        problems += [mask.problem] if isinstance(mask, Mask) and mask.problem else []
        problems += ["a mask tensor of its own"] if isinstance(mask, Tensor) else []
        problems += ["attention to other tokens than the step's"] if key.shape[2] != query.shape[2] else []
        problems += ["values wider than keys"] if value.shape[-1] > head_dim else []
        if problems:
            raise ConfigError(
                f"{type(module).__name__} of transformers asks attention for {', '.join(problems)}, which hal's "
                "operation does not have",
                REMEDY,
            )
        if isinstance(mask, Mask):
            window, causal = mask.window, mask.causal
        else:
            window, causal = None, options.get("is_causal", getattr(module, "is_causal", True)) is not False
        same = [index for index, (known, other) in enumerate(self._seen) if known is key and other is value]
        self.calls.append(Call(same[0] if same else len(self.calls), value.shape[-1]))
        self._seen.append((key, value))
        asked = ops.AttentionOptions(
            head_dim**-0.5 if scale is None else float(scale), window, options.get("softcap") or None, causal
        )
        self.layers.append(Attention(key.shape[1], head_dim, asked))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


def skip_experts(module: Any, hidden_states: Tensor, *_: Any) -> Tensor:
    """Return what experts return, without values; the function for ``ExpertsInterface``, before hal's replace them."""
    return torch.empty_like(hidden_states)


class NoCache(Cache):  # type: ignore[misc]
    """The cache that layers see: it returns the new keys and values as they are, and refuses other states."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.layer_class_to_replicate, self.offloading = None, False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[Any, int]:
        """Return the number of keys and the first one."""
        return query_length, 0

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Return 0."""
        return 0

    def get_query_offset(self, *_: Any) -> int:
        """Return 0."""
        return 0

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ConfigError("a layer of transformers' model keeps another state than keys and values", REMEDY)

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = update_indexer = _refuse
    has_previous_state = _refuse
