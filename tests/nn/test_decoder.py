"""Decoders that are assembled at random, against the same computation in plain torch."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hal.models.llama import LlamaForCausalLM
from helpers.reference import open_runner
from helpers.thorough import DRAW, EXHAUSTIVE, MODE, thorough
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from hal import ops
from hal.checkpoint.weight_bindings import bindings_of
from hal.errors import ConfigError
from hal.nn import (
    MLP,
    POST_NORMS,
    PRE_NORMS,
    SANDWICH_NORMS,
    SHARED_NORM,
    CausalLM,
    DecoderConfig,
    DecoderLayer,
    DecoderLM,
    GatedMLP,
    HyperConnection,
    HyperDecoderLayer,
    LayerNorm,
    LayerNorms,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    StreamHead,
    StreamMean,
)
from hal.ops import HyperConnectionOptions
from hal.step import ALL

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 48, 4, 2, 16, 23
STREAMS = 3
CLIPPED = partial(ops.clipped_silu_and_mul, alpha=1.5, limit=0.4, interleaved=False)
GATED: Mapping[str, Any] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


@attrs.frozen(kw_only=True)
class PartlyRotated(DecoderConfig):
    partial_rotary = True


@attrs.frozen
class Choice:
    """The choices of a decoder."""

    layer_norm: bool
    bias: bool
    offset: float
    norms: LayerNorms
    parallel: bool
    gated: bool
    activation: str
    clipped: bool
    query_norm: str | None
    gate: bool
    sinks: bool
    softcap: float | None
    scale: float
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]
    part: float
    interleaved: bool
    tied: bool
    factors: tuple[float, float, float]
    logit_softcap: float | None
    hyper: HyperConnectionOptions | None
    weighted: bool

    @classmethod
    def draw(cls, seed: int) -> Choice:
        draw = random.Random(seed)
        norms = draw.choice((PRE_NORMS, POST_NORMS, SANDWICH_NORMS, SHARED_NORM))
        gated, flag = draw.random() < 0.7, lambda: draw.random() < 0.5
        return cls(
            layer_norm=flag(),
            bias=flag(),
            offset=draw.choice((0.0, 1.0)),
            norms=norms,
            parallel=norms is SHARED_NORM or draw.random() < 0.3,
            gated=gated,
            activation=draw.choice(tuple(GATED)),
            clipped=gated and draw.random() < 0.3,
            query_norm=draw.choice((None, "head", "width")),
            gate=flag(),
            sinks=flag(),
            softcap=draw.choice((None, 2.0)),
            scale=draw.choice((0.25, 0.4)),
            windows=tuple(draw.choice((None, 5)) for _ in range(3)),
            rotates=tuple(draw.random() < 0.7 for _ in range(3)),
            part=draw.choice((1.0, 0.5)),
            interleaved=flag(),
            tied=flag(),
            factors=(draw.choice((1.0, 6.0)), draw.choice((1.0, 0.3)), draw.choice((1.0, 0.5))),
            logit_softcap=draw.choice((None, 1.5)),
            weighted=flag(),
            hyper=draw.choice((None, HyperConnectionOptions(1e-3, 1e-2, draw.choice((0, 4)), 1.5, 0.1))),
        )

    def norm(self, width: int, **given: Any) -> LayerNorm | RMSNorm:
        if self.layer_norm and not given:
            return LayerNorm(width, 1e-3, bias=self.bias, offset=self.offset)
        return RMSNorm(width, 1e-3, offset=self.offset, **given)

    def model(self, config: Mapping[str, Any]) -> DecoderLM:
        made = PartlyRotated.from_config({**config, "partial_rotary_factor": self.part})
        rotary = RotaryEmbedding(HEAD_DIM, made.rope, interleaved=self.interleaved)
        embedding, residual, logits = self.factors

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(
                made,
                rotary if self.rotates[index] else None,
                window=self.windows[index],
                scale=self.scale,
                softcap=self.softcap,
                sinks=self.sinks,
                bias=(self.bias, not self.bias),
                norm=self.norm if self.query_norm else None,
                norm_over="width" if self.query_norm == "width" else "head",
                gate=self.gate,
            )
            activation: Any = CLIPPED if self.clipped else self.activation
            mlp = (GatedMLP if self.gated else MLP)(HIDDEN, 40, activation=activation, bias=self.bias)
            shape = {"norms": self.norms, "parallel": self.parallel, "residual_multiplier": residual}
            if self.hyper is None:
                return DecoderLayer(made, attention, mlp, norm=self.norm, **shape)  # type: ignore[arg-type]
            del shape["parallel"]
            connection = partial(HyperConnection, HIDDEN, STREAMS, self.hyper)
            return HyperDecoderLayer(
                made,
                attention,
                mlp,
                norm=self.norm,
                connection=connection,
                **shape,
            )

        streams = None
        if self.hyper is not None:
            streams = StreamHead(HIDDEN, STREAMS, 1e-3, 1e-2) if self.weighted else StreamMean(STREAMS)

        return DecoderLM(
            made,
            map(layer, range(3)),
            norm=self.norm,
            embedding_multiplier=embedding,
            streams=streams,
            logits_multiplier=logits,
            softcap=self.logit_softcap,
        )

    def normed(self, x: Tensor, weights: Mapping[str, Tensor], name: str, *, parts: bool = False) -> Tensor:
        weight = weights[f"{name}.weight"] + self.offset
        if self.layer_norm and not parts:
            return functional.layer_norm(x, weight.shape, weight, weights.get(f"{name}.bias"), 1e-3)
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-3) * weight

    def expected(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Return the logits of a sequence, ``[tokens, vocab_size]``."""
        embedding, residual, logits = self.factors
        hidden = weights["model.embed_tokens.weight"][tokens] * embedding
        if self.hyper is not None:
            hidden = torch.stack([hidden] * STREAMS, 1)
        for index in range(3):
            hidden = self._layer(hidden, index, weights, residual)
        if self.hyper is not None and self.weighted:
            head = [weights[f"model.hc_head.hc_{part}"] for part in ("fn", "scale", "base")]
            hidden = torch.einsum("tn,tnd->td", _stream_weights(hidden, *head).sigmoid() + 1e-2, hidden)
        elif self.hyper is not None:
            hidden = hidden.mean(1)
        hidden = self.normed(hidden, weights, "model.norm")
        found = hidden @ weights["model.embed_tokens.weight" if self.tied else "lm_head.weight"].T * logits
        return found if self.logit_softcap is None else self.logit_softcap * torch.tanh(found / self.logit_softcap)

    def _layer(self, hidden: Tensor, index: int, weights: Mapping[str, Tensor], residual: float) -> Tensor:
        prefix = f"model.layers.{index}."

        def norm(name: str | None, x: Tensor) -> Tensor:
            return x if name is None else self.normed(x, weights, prefix + name)

        if self.hyper is not None:
            for part, (before, after), compute in (
                (
                    "attn",
                    attrs.astuple(self.norms)[:2],
                    lambda x: self._attention(x, index, weights, f"{prefix}self_attn."),
                ),
                ("ffn", attrs.astuple(self.norms)[2:], lambda x: self._mlp(x, weights, f"{prefix}mlp.")),
            ):
                tensors = [weights[f"{prefix}{part}_hc.{each}"] for each in ("fn", "scale", "base")]
                read, post, mix = _connection(hidden, *tensors, self.hyper)
                output = norm(after, compute(norm(before, read))) * residual
                hidden = torch.einsum("tji,tjd->tid", mix, hidden) + torch.einsum("tn,td->tnd", post, output)
            return hidden
        attended = self._attention(norm(self.norms.before_attention, hidden), index, weights, f"{prefix}self_attn.")
        after = hidden + norm(self.norms.after_attention, attended) * residual
        given = norm(self.norms.before_mlp, hidden if self.parallel else after)
        return after + norm(self.norms.after_mlp, self._mlp(given, weights, f"{prefix}mlp.")) * residual

    def _mlp(self, x: Tensor, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
        up = _linear(x, weights, f"{prefix}up_proj")
        if not self.gated:
            inner = GATED[self.activation](up)
        elif self.clipped:
            gate, up = _linear(x, weights, f"{prefix}gate_proj").clamp(max=0.4), up.clamp(-0.4, 0.4)
            inner = gate * torch.sigmoid(1.5 * gate) * (up + 1)
        else:
            inner = GATED[self.activation](_linear(x, weights, f"{prefix}gate_proj")) * up
        return _linear(inner, weights, f"{prefix}down_proj")

    def _attention(self, x: Tensor, index: int, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
        query, key, value = (_linear(x, weights, f"{prefix}{part}_proj") for part in "qkv")
        gate = None
        if self.gate:
            query, gate = (each.flatten(1) for each in query.view(LENGTH, HEADS, 2, HEAD_DIM).unbind(2))
        if self.query_norm == "width":
            key = self.normed(key, weights, f"{prefix}k_norm", parts=True)
            query = self.normed(query, weights, f"{prefix}q_norm", parts=True)
        query, key, value = (each.view(LENGTH, -1, HEAD_DIM) for each in (query, key, value))
        if self.query_norm == "head":
            query = self.normed(query, weights, f"{prefix}q_norm")
            key = self.normed(key, weights, f"{prefix}k_norm")
        if self.rotates[index]:
            query, key = self._rotated(query), self._rotated(key)
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        apart = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        hidden = (apart < 0) | (apart >= (self.windows[index] or LENGTH))
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks:
            sinks = weights[f"{prefix}sinks"].view(HEADS, 1, 1).expand(HEADS, LENGTH, 1)
            scores = torch.cat((scores, sinks), -1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :LENGTH], value)
        attended = attended if gate is None else attended * torch.sigmoid(gate.view(LENGTH, HEADS, HEAD_DIM))
        return _linear(attended.flatten(1), weights, f"{prefix}o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        """Multiply pairs as complex numbers."""
        width = int(HEAD_DIM * self.part)
        angles = torch.arange(LENGTH)[:, None] / 100.0 ** (torch.arange(0, width, 2) / width)
        turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        part, rest = x[..., :width], x[..., width:]
        pairs = part.unflatten(-1, (-1, 2)) if self.interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        turned = turned if self.interleaved else turned.transpose(-1, -2)
        return torch.cat((turned.flatten(-2), rest), dim=-1)


def _stream_weights(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    flat = streams.flatten(1)
    sizes = (STREAMS, STREAMS, len(base) - 2 * STREAMS)[: len(scale)]
    factors = torch.cat([part.expand(size) for part, size in zip(scale, sizes, strict=True)])
    return flat @ fn.T / torch.sqrt((flat**2).mean(-1, keepdim=True) + 1e-3) * factors + base


def _connection(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, options: HyperConnectionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return collapsed streams, the weights of the output, and the matrix of each token that mixes its streams."""
    found = _stream_weights(streams, fn, scale, base)
    read = torch.einsum("tn,tnd->td", found[:, :STREAMS].sigmoid() + options.eps, streams)
    post = options.magnitude * found[:, STREAMS : 2 * STREAMS].sigmoid() + options.post_eps
    if not options.iterations:
        return read, post, torch.eye(STREAMS).expand(len(streams), -1, -1)
    mix = found[:, 2 * STREAMS :].view(-1, STREAMS, STREAMS).softmax(2) + options.eps
    for step in range(2 * options.iterations - 1):
        mix = mix / (mix.sum(2 if step % 2 else 1, keepdim=True) + options.eps)
    return read, post, mix


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


DRAWS = {"eager": 10, "graph": 10, "piecewise": 10, "inductor": 4}
"""Numbers of draws; Inductor takes seconds to compile each."""


@thorough(EXHAUSTIVE, r"\[inductor-seed=[023]")
@thorough(EXHAUSTIVE, r"\[(piecewise-seed=[2-9]|graph-seed=[0-3]|eager-seed=[4-9])")
@thorough(DRAW, "piecewise-seed=1|seed=[2-9]")
@thorough(MODE, "inductor")
@pytest.mark.parametrize(
    ("compiler", "seed"),
    [pytest.param(name, seed, id=f"{name}-seed={seed}") for name, count in DRAWS.items() for seed in range(count)],
)
def test_logits(seed: int, compiler: str, tmp_path: Path) -> None:
    choice = Choice.draw(seed)
    config = {
        "architectures": ["Assembled"],
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
        "tie_word_embeddings": choice.tied,
    }

    class Assembled(DecoderLM):
        @classmethod
        def from_config(cls, config: Mapping[str, Any]) -> CausalLM:
            return choice.model(config)

    with torch.device("meta"):
        pieces = [piece for binding in bindings_of(choice.model(config)) for piece in binding.pieces()]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for piece in pieces:
        noise = torch.randn(piece.source_shape, generator=generator)
        weights[piece.source] = 0.5 + 0.3 * noise if noise.dim() == 1 else noise * noise.shape[1] ** -0.5
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))

    tokens = torch.randint(64, (LENGTH,), generator=generator)
    runner = open_runner(tmp_path, compiler, num_tokens=256, model_class=Assembled)
    parts = [runner.step(runner.batch([tokens[:17].tolist()], [[1, 2]]), ALL).logits.clone()]
    for at in range(17, LENGTH):
        batch = runner.batch([tokens[at : at + 1].tolist()], [[1, 2]], cached=[at])
        parts.append(runner.step(batch).logits.clone())
    torch.testing.assert_close(
        torch.cat(parts), choice.expected(weights, tokens), rtol=1e-4, atol=1e-4, msg=str(choice)
    )


def test_a_part_of_heads_is_refused_where_transformers_rotates_whole_ones() -> None:
    config = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes = {"num_attention_heads": 2, "max_position_embeddings": 8}
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.5, and this family rotates whole heads"):
        LlamaForCausalLM.from_config({**config, **sizes, "partial_rotary_factor": 0.5})


@pytest.mark.usefixtures("cpu")
def test_a_tied_head_may_have_a_bias() -> None:
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        tie_word_embeddings=True,
    )
    model, plain = (DecoderLM(config, [], head_bias=each) for each in (True, False))
    table, bias, hidden = torch.randn(8, 8), torch.randn(8), torch.randn(3, 8)
    assert [name for name, _ in model.named_parameters()][-1] == "lm_head.bias"
    model.load_state_dict({"lm_head.bias": bias, "model.embed_tokens.weight": table}, strict=False)
    plain.load_state_dict({"model.embed_tokens.weight": table}, strict=False)
    torch.testing.assert_close(model.logits(hidden), plain.logits(hidden) + bias, rtol=0, atol=0)
