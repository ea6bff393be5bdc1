"""Other wirings of a drafting model: its inputs shifted, its norms exchanged, another rotary embedding, and so on.

A fault of a checkpoint, a configuration or an adapter is a wiring that no reference of an operation can know. But the
drafter then predicts worse than with the right wiring. So a drafter is compared with what it would predict otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from typing import Any

import attrs
import torch
from torch import nn

from hal.generation.drafting.draft_passes import Feed, TargetPass
from hal.nn import CausalLM, DecoderLM, DraftLM, LayerNorm, Linear, MergedLinear, RMSNorm, RotaryEmbedding

BASES = (10_000.0, 500_000.0, 1_000_000.0)
"""The usual bases of rotary embeddings."""
KINDS = (RMSNorm, LayerNorm)
"""The norms that are exchanged with others of the same kind."""
BETTER_TABLE = 0.5
"""The least gain by the target's embedding that means a fault: a drafter in fewer bits gains a little by it, too."""


Change = Callable[[ExitStack], None]
"""Changes a model until the stack is closed."""


def _nothing(stack: ExitStack) -> None:
    pass


@attrs.frozen(eq=False)
class Wiring:
    """A wiring to compare with.

    Attributes:
        name: what is different, which ends a sentence such as "it predicts better with".
        change: changes the model.
        feed: the inputs; None for the usual ones, which the changed model may read otherwise.
        least: the least gain in the overlap that means a fault, as a part of the overlap.
    """

    name: str
    change: Change = _nothing
    feed: Feed | None = None
    least: float = 0.0


def wirings_of(model: CausalLM, target: CausalLM, text: TargetPass) -> Iterator[Wiring]:
    """Yield other wirings of a drafting model.

    Args:
        model: the drafting model.
        target: the model that it drafts for.
        text: what the target computes for the text to compare on.
    """
    changes = [*_other_norms(model), *_other_angles(model)]
    if isinstance(model, DraftLM):
        yield from _other_inputs(model, target, text)
        changes += _other_orders(model)
    for name, change in changes:
        yield Wiring(name, change)
    if (table := _table(model, target)) is not None:
        yield Wiring("the embedding of the model that it drafts for", table, least=BETTER_TABLE)


def _other_inputs(model: DraftLM, target: CausalLM, text: TargetPass) -> Iterator[Wiring]:
    tokens, hidden = text.tokens, text.read(model)
    yield Wiring(
        "the hidden states of the position before", feed=Feed(tokens[1:], torch.cat([hidden[:1], hidden[:-2]]))
    )
    yield Wiring("the hidden states of the position behind", feed=Feed(tokens[1:], hidden[1:]))
    yield Wiring("the tokens of the position before", feed=Feed(tokens[:-1], hidden[:-1]))
    yield Wiring("the tokens of the position behind", feed=Feed([*tokens[2:], tokens[-1]], hidden[:-1]))
    count = len(text.states)
    kept = target.base.kept_layers if model.reads is not None and isinstance(target, DecoderLM) else ()
    others = [tuple(each + by for each in kept) for by in (-1, 1)] if kept else [(count - 2,), (count - 1,)]
    for layers in others:
        if count and min(layers) >= 0 and max(layers) < count:
            states = model.read(torch.cat([text.states[each] for each in layers], -1).to(hidden.dtype))
            numbers = ", ".join(map(str, layers)) if layers != (count - 1,) else "none, before its last norm"
            yield Wiring(f"the inputs of the model's layers {numbers}", feed=Feed(tokens[1:], states[:-1]))


def _other_norms(model: nn.Module) -> Iterator[tuple[str, Change]]:
    places: dict[tuple[str, str], list[nn.Module]] = {}
    for parent in model.modules():
        norms = {name: each for name, each in parent.named_children() if isinstance(each, KINDS)}
        for pair in combinations(norms, 2):
            one, other = (norms[name] for name in pair)
            if type(one) is type(other) and one.weight.shape == other.weight.shape:
                places.setdefault(pair, []).append(parent)
    for pair, parents in places.items():
        yield f"the norms {pair[0]} and {pair[1]} exchanged", partial(_exchange, parents, *pair)
    learned = [each for each in model.modules() if isinstance(each, KINDS) and "weight" in each._parameters]
    for sign, name in ((1.0, "1 added to the weights of norms"), (-1.0, "1 subtracted from the weights of norms")):
        yield name, partial(_shift, learned, sign)


def _other_angles(model: nn.Module) -> Iterator[tuple[str, Change]]:
    rotaries = [each for each in model.modules() if isinstance(each, RotaryEmbedding)]
    if not rotaries:
        return
    for base in BASES:
        if others := [each for each in rotaries if each.rope.rope_theta != base]:
            values = [(each, "rope", attrs.evolve(each.rope, rope_theta=base)) for each in others]
            yield f"the base {base:.0f} of the rotary embedding", partial(_replace, values)
    flipped = [(each, "interleaved", not each.interleaved) for each in rotaries]
    kind = "halves" if rotaries[0].interleaved else "adjacent elements"
    yield f"pairs of {kind} in the rotary embedding", partial(_replace, flipped)


def _other_orders(model: DraftLM) -> Iterator[tuple[str, Change]]:
    """Yield the reverse order of the parts of inputs that seem to have several."""
    width = model.base.embed_tokens.width
    for name, each in model.named_modules():
        if isinstance(each, Linear | MergedLinear) and each.in_features > width and each.in_features % width == 0:
            yield (
                f"the {each.in_features // width} parts of the input of {name} reversed",
                partial(_reverse, each, width),
            )


def _table(model: CausalLM, target: CausalLM) -> Change | None:
    """Return the use of the target's embedding, if a model may have the same."""
    if not (isinstance(model, DecoderLM) and isinstance(target, DecoderLM)):
        return None
    mine, theirs = model.base.embed_tokens, target.base.embed_tokens
    if mine is theirs or (mine.vocab_size, mine.width) != (theirs.vocab_size, theirs.width):
        return None
    return partial(_replace, [(model.base, "embed_tokens", theirs)])


def _replace(values: Sequence[tuple[Any, str, Any]], stack: ExitStack) -> None:
    for owner, name, value in values:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _exchange(parents: Sequence[nn.Module], one: str, other: str, stack: ExitStack) -> None:
    for each in parents:
        _replace([(each, one, getattr(each, other)), (each, other, getattr(each, one))], stack)


def _shift(norms: Sequence[RMSNorm | LayerNorm], by: float, stack: ExitStack) -> None:
    weights = [nn.Parameter(each.weight + by, requires_grad=False) for each in norms]
    _replace([(each, "weight", weight) for each, weight in zip(norms, weights, strict=True)], stack)


def _reverse(linear: nn.Module, width: int, stack: ExitStack) -> None:
    def reversed_parts(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.cat(args[0].split(width, dim=-1)[::-1], dim=-1), *args[1:])

    stack.callback(linear.register_forward_pre_hook(reversed_parts).remove)
