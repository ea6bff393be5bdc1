"""The probe: what the layers of a model ask attention for, found by one call on meta tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from hal import ops
from hal.errors import ConfigError
from hal.nn import Attention
from hal.sources.transformers.buffers import computed_buffer
from hal.sources.transformers.calls import Call
from hal.sources.transformers.in_class import Keys, Known, Scores, Values, buffer_of
from hal.sources.transformers.masks import Mask, SeenMask, Zeros, mask_of
from hal.sources.transformers.phase import PHASE, REMEDY
from hal.sources.transformers.tensor_parallel import WholeAttention, plan_of, splits_heads

UNSUPPORTED = (
    "position_bias",
    "attention_bias",
    "alibi",
    "head_mask",
    "layer_head_mask",
    "indices",
)
"""Arguments of an attention function that change its result, and that hal's operation does not have."""


class Probe:
    """Records the calls of attention, and refuses those that hal has no operation for.

    Args:
        positions: of the tokens, ``[tokens, 1]``, without values.

    Attributes:
        layers: the attention of each.
        positions: the argument.
        in_class: whether classes of the model compute attention themselves.
        zeros: the known zeros.
    """

    def __init__(self, model: nn.Module, positions: Tensor) -> None:
        self.positions, self.zeros, self.in_class = positions, Zeros(), False
        self.calls: list[Call] = []
        self.layers: list[Attention] = []
        self._model, self._plan = model, plan_of(model)
        self._paths = {id(each): path for path, each in model.named_modules()}
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._stored: tuple[Tensor, Tensor] | None = None

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
        problems += ["a mask tensor of its own"] if type(mask) is Tensor else []
        problems += ["attention to other tokens than the step's"] if key.shape[2] != query.shape[2] else []
        if isinstance(mask, SeenMask):
            says = mask.says
        else:
            says = Mask(causal=options.get("is_causal", getattr(module, "is_causal", True)) is not False)
        asked = ops.AttentionOptions(
            head_dim**-0.5 if scale is None else float(scale),
            says.window,
            options.get("softcap") or None,
            says.causal,
            says.chunk,
        )
        whole = id(module) in self._paths and not splits_heads(module, self._paths[id(module)], self._plan)
        name = type(module).__name__
        self._record(name, key, value, asked, [*problems, says.problem], _tuning(module), whole=whole)
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer gets for the keys and values ``[tokens, heads, 1, head_dim]``."""
        self._stored = key.as_subclass(Keys), value.as_subclass(Values)
        return self._stored

    def score(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return the scores of queries of a class that computes attention itself."""
        self.in_class = True
        known = Known(query, self.positions.shape[0], self._mask_of, self.zeros)
        return Scores.of(known, query.new_empty(*query.shape[:-1], keys.shape[-1]))

    def weigh(self, weights: Tensor, values: Tensor) -> Tensor:
        """Record a call of a class that computes attention itself, by what it did with its scores."""
        known = getattr(weights, "known", None)
        if known is None or not known.weights or self._stored is None:
            raise ConfigError("attention is computed in the class, not by transformers' interface", REMEDY)
        (key, value), self._stored = self._stored, None
        says = known.mask or Mask()
        asked = ops.AttentionOptions(known.scale, says.window, None, says.causal, says.chunk, known.alibi)
        self._record("a layer", key, value, asked, [says.problem], None)
        query: Tensor = known.query
        return query.new_empty(*weights.shape[:-1], values.shape[-1], dtype=values.dtype)

    def _record(
        self,
        name: str,
        key: Tensor,
        value: Tensor,
        asked: ops.AttentionOptions,
        problems: Sequence[str | None],
        tuning: tuple[float, float] | None,
        *,
        whole: bool = False,
    ) -> None:
        head_dim = key.shape[-1]
        if value.shape[-1] > head_dim:
            problems = [*problems, "values wider than keys"]
        if found := [each for each in problems if each]:
            raise ConfigError(
                f"{name} of transformers asks attention for {', '.join(found)}, which hal's operation does not have",
                REMEDY,
            )
        same = [index for index, (known, other) in enumerate(self._seen) if known is key and other is value]
        self.calls.append(Call(same[0] if same else len(self.calls), value.shape[-1], tuning))
        self._seen.append((key, value))
        self.layers.append((WholeAttention if whole else Attention)(key.shape[1], head_dim, asked))

    def _mask_of(self, tensor: Tensor) -> Mask | None:
        """Return what a tensor says that excludes scores: a mask, or a part of a table of all positions."""
        if isinstance(tensor, SeenMask):
            return tensor.says
        found = buffer_of(self._model, tensor)
        if found is None:
            return None
        seen = computed_buffer(self._model, *found).squeeze()
        if seen.dtype is not torch.bool or seen.dim() != 2 or seen.shape[0] != seen.shape[1]:
            return None
        place = torch.arange(seen.shape[0], device="cpu")
        return mask_of(seen, place[:, None], place[None], int(seen[-1].sum()))


def _tuning(module: Any) -> tuple[float, float] | None:
    """Return the tokens of a step and the factor of a layer's attention temperature; None if it has none."""
    found: tuple[float, float] | None = vars(module).get("hal_tuning")
    return found


def tune_in_attention(model: nn.Module) -> None:
    """Leave the temperature of attention by position, as in Llama 4, to the step, which knows the positions."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and not getattr(module, "use_rope", True):
            vars(module)["hal_tuning"] = (float(module.floor_scale), float(module.attn_scale))  # type: ignore[arg-type]
            module.attn_temperature_tuning = False  # type: ignore[assignment]


def check_lengths(model: nn.Module) -> None:
    """Raise ConfigError for a model whose attention is of another kind for long texts, as BigBird's."""
    for module in model.modules():
        if (
            hasattr(module, "set_attention_type")
            and (kind := getattr(module, "attention_type", None)) == "block_sparse"
        ):
            raise ConfigError(
                f"config.json has the attention_type {kind}, which attends to blocks of a long text, some at random",
                "set attention_type to original_full in config.json, or run the model with transformers",
            )


def skip_experts(module: Any, hidden_states: Tensor, *_: Any) -> Tensor:
    """Return what experts return, without values; the function for ``ExpertsInterface``, before hal's replace them."""
    return torch.empty_like(hidden_states)


class _NoLayers(list[Any]):
    """The layers of a cache that has none: a class that asks for one keeps a state of its own there."""

    def __getitem__(self, _: Any) -> Any:
        raise ConfigError("a layer of transformers' model keeps another state than keys and values", REMEDY)


class NoCache(Cache):  # type: ignore[misc]
    """The cache that layers see: it returns the new keys and values as they are, and refuses other states."""

    def __init__(self) -> None:
        self.layers: list[Any] = _NoLayers()
        self.layer_class_to_replicate, self.offloading = None, False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values, or what the phase puts in their place."""
        store = getattr(PHASE.get(), "store", None)
        return (key_states, value_states) if store is None else store(key_states, value_states)

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[Any, int]:
        """Return the number of keys and the first one."""
        return query_length, 0

    def get_seq_length(self, layer_idx: int | None = None, **_: Any) -> int:
        """Return 0. A layer that asks for its own length counts positions by it, which are not those of the step."""
        if layer_idx is not None:
            raise ConfigError("a layer of transformers' model counts positions by its cache", REMEDY)
        return 0

    def get_query_offset(self, *_: Any) -> int:
        """Return 0."""
        return 0

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ConfigError("a layer of transformers' model keeps another state than keys and values", REMEDY)

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = update_indexer = _refuse
    has_previous_state = _refuse
