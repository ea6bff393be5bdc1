"""hal's layers in the place of transformers', where they compute the same.

A layer is recognized by what it computes on random values, not by the name of its class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from hal import ops
from hal.nn import Embedding, LayerNorm, Linear, RMSNorm, Transposed, Weight

EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "layernorm_epsilon")
"""The attributes in which norms keep what they add to the variance."""


class TokenEmbedding(Embedding):
    """hal's embedding of token ids of any shape."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map ``[...]`` to ``[..., width]``."""
        return super().forward(token_ids.reshape(-1)).view(*token_ids.shape, -1)


class TiedHead(nn.Module):
    """The output projection of a model whose embedding is also that."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # It is a submodule elsewhere.

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to ``[..., vocab_size]``."""
        return self._embedding[0].as_linear(x)


def computes(layer: nn.Module, given: Mapping[str, Tensor], x: Tensor, wanted: Tensor) -> bool:
    """Return whether a layer with other parameters maps ``x`` to ``wanted``, up to rounding in float32."""
    try:
        found = functional_call(layer, dict(given), (x,))
    except Exception:  # A layer of another form may raise anything.
        return False
    return isinstance(found, Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted, 1e-4, 1e-5)


def takes_one(layer: nn.Module) -> bool:
    """Return whether the forward of a layer has one parameter."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return len(parameters) == 1 and all(each.kind is not each.VAR_KEYWORD for each in parameters)


class Inputs:
    """Records the inputs of projections, and of layers without tensors, in a call of a model.

    They are kept, so that ids are distinct.
    """

    def __init__(self, model: nn.Module) -> None:
        self._projections: dict[str, list[Tensor]] = {}
        self._others: dict[str, list[Tensor]] = {}
        self._hooks: list[RemovableHandle] = []
        for path, layer in model.named_modules():
            if type(layer) is nn.Linear:
                self._hooks.append(layer.register_forward_pre_hook(_kept(self._projections, path)))
            elif not any(True for _ in (*layer.children(), *layer.parameters())) and takes_one(layer):
                self._hooks.append(layer.register_forward_pre_hook(_kept(self._others, path)))

    def close(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()

    def groups(self) -> list[tuple[str, list[str]]]:
        """Return the projections of one input beside each other: the path above them and their names, as called."""
        found: dict[Any, list[str]] = {}
        for path, inputs in self._projections.items():
            parent, _, name = path.rpartition(".")
            found.setdefault((parent, tuple(map(id, inputs))), []).append(name)
        return [(parent, names) for (parent, _), names in found.items() if len(names) > 1]

    def widths(self) -> dict[str, int]:
        """Return the width of the inputs of each layer without tensors that has a single one, as of its norms."""
        widths = {path: {each.shape[-1] for each in inputs} for path, inputs in self._others.items()}
        return {path: min(found) for path, found in widths.items() if len(found) == 1}


def _kept(seen: dict[str, list[Tensor]], path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    return lambda _, args: seen.setdefault(path, []).append(args[0]) if args else None


def norm_of(layer: nn.Module, width: int | None = None) -> nn.Module | None:
    """Return hal's norm that computes what a layer does, or None.

    Args:
        width: of its input, which is needed if the layer has no weight.
    """
    if list(layer.children()):
        return None
    names = {name for name, _ in layer.named_parameters()}
    eps = next((value for name in EPSILONS if isinstance(value := getattr(layer, name, None), float)), None)
    weight = getattr(layer, "weight", None)
    if names not in (set(), {"weight"}, {"weight", "bias"}) or eps is None or not takes_one(layer):
        return None
    if names:
        width = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 1 else None
    if width is None:
        return None
    kinds: list[tuple[Callable[[], nn.Module], str, float]] = [
        (lambda: LayerNorm(width, eps, bias="bias" in names, offset=0.0), "layer_norm", 0.0),
        (lambda: LayerNorm(width, eps, bias="bias" in names, offset=1.0), "layer_norm", 1.0),
    ]
    if not names:
        kinds = [(lambda: RMSNorm(width, eps, learned=False), "rms_norm", 0.0)]
    elif "bias" not in names:
        kinds += [
            (lambda: RMSNorm(width, eps), "rms_norm", 0.0),
            (lambda: RMSNorm(width, eps, offset=1.0), "rms_norm", 1.0),
        ]
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        given = {name: torch.randn(width, generator=generator) for name in sorted(names)}
        x = torch.randn(2, 3, width, generator=generator) + 0.5
        scale = given.get("weight", torch.ones(width))
        for make, name, offset in kinds:
            bias = [given.get("bias")] if name == "layer_norm" else []
            reference = ops.operation(name).body
            # With small values epsilon counts.
            if all(
                computes(layer, given, factor * x, reference(factor * x, scale + offset, *bias, eps))
                for factor in (1.0, eps**0.5)
            ):
                with torch.device("meta"):
                    return make()
    return None


def embedding_of(layer: nn.Embedding) -> TokenEmbedding | None:
    """Return hal's embedding that computes what a layer does, or None."""
    if layer.max_norm is not None or not takes_one(layer):
        return None
    layer.padding_idx = None  # It concerns gradients, and must be a row of the table.
    found = next(
        (value for name in ("scalar_embed_scale", "embed_scale") if _number(value := getattr(layer, name, None))), 1.0
    )
    scale = float(found or 1.0)
    with torch.device("cpu"):
        rows = torch.randn(layer.num_embeddings if layer.num_embeddings < 8 else 8, layer.embedding_dim)
        token_ids = torch.tensor([[1], [3]]) % rows.shape[0]
        buffers = {name: torch.tensor(scale) for name, _ in layer.named_buffers()}
        if not computes(layer, {"weight": rows, **buffers}, token_ids, rows[token_ids] * scale):
            return None
    with torch.device("meta"):
        return TokenEmbedding(layer.num_embeddings, layer.embedding_dim, scale)


def _number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


class TransposedLinear(Linear):
    """A projection whose weight the checkpoint has as ``[in_features, out_features]``."""

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        declared = super().weights
        return {**declared, "weight": attrs.evolve(declared["weight"], assemble=Transposed(), sizes=None)}


def linear_of(layer: nn.Linear, kind: type[Linear] = Linear, **options: Any) -> Linear:
    """Return hal's projection in the place of a layer.

    Args:
        options: how ranks split it; see :class:`hal.nn.Linear`.
    """
    with torch.device("meta"):
        return kind(layer.in_features, layer.out_features, bias=layer.bias is not None, **options)
