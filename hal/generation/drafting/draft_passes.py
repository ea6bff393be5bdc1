"""Passes of a drafting model over whole texts, without its drafter: on a backend's kernels, or on the references.

The drafter runs few tokens at a time, on graphs, beside a cache. A pass runs a whole text at once, eagerly, on new
states. Both give the same drafts, unless a drafter reads wrong positions, cached tokens or hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hal import ops
from hal.execution.runner import Runner
from hal.nn import CausalLM, DecoderLM, DraftLM
from hal.nn.model import flat_outputs
from hal.ops import Operation
from hal.ops.rounding import Disturbance
from hal.step.fields import DUMMY_BLOCK
from hal.step.state import canonical_states

HIDDEN = "hidden_states"


@attrs.frozen(eq=False)
class Feed:
    """What a drafting model reads for a text.

    Attributes:
        tokens: the token of each position; the one behind it for a model that reads hidden states.
        hidden: ``[positions, width]``, the target's hidden states; None for a model that reads none.
    """

    tokens: list[int]
    hidden: Tensor | None = None


@attrs.frozen(eq=False)
class TargetPass:
    """What the target computes for a text.

    Attributes:
        tokens: the text.
        outputs: what its ``forward`` returns, by name: ``hidden_states`` and the extra tensors.
        logits: ``[positions, vocab_size]``, float32.
        states: the input of each layer, and the output of the last; empty if the model has no list of layers.
    """

    tokens: list[int]
    outputs: Mapping[str, Tensor]
    logits: Tensor
    states: Sequence[Tensor]

    def feed(self, model: CausalLM) -> Feed:
        """Return what a drafting model reads for the text. It predicts what :meth:`predicted` returns."""
        return Feed(self.tokens[1:], self.read(model)[:-1]) if isinstance(model, DraftLM) else Feed(self.tokens)

    def read(self, model: DraftLM) -> Tensor:
        """Return the hidden states that a drafting model reads, one for each token of the text.

        Call it in :meth:`hal.Runner.running`, as :meth:`feed`, because the model may compute them.
        """
        return model.read(self.outputs[model.reads or HIDDEN])

    def predicted(self, model: CausalLM) -> Tensor:
        """Return the logits that a drafting model predicts, for each of its positions."""
        return self.logits[1:] if isinstance(model, DraftLM) else self.logits


def pass_of_target(runner: Runner, tokens: list[int]) -> TargetPass:
    """Run a text through the model. The blocks of its cache must be free, and are overwritten."""
    model, states = runner.model, list[Tensor]()
    slots = (runner.slots.take(model.batch_type.saves) or []) if runner.slots.needed else []
    slot, *spare = slots or (None,)
    inputs = runner.input_batch(1, len(tokens))
    first = DUMMY_BLOCK + 1
    inputs.add(tokens, range(first, first + runner.spec.blocks_for(len(tokens))), slot=slot, spare_slots=spare)
    with _noting_states(model, states), runner.running():
        found = flat_outputs(model, model(inputs.batch([len(tokens)]), runner.states.layers))
        outputs = dict(zip((HIDDEN, *model.extra), found, strict=True))
        logits = model.logits(outputs[HIDDEN]).float()
    runner.slots.give_back(slots)
    return TargetPass(tokens, outputs, logits, states)


@contextmanager
def _noting_states(model: CausalLM, found: list[Tensor]) -> Iterator[None]:
    """Note the inputs of a decoder's layers and the output of the last one in the block."""
    layers = [*model.base.layers] if isinstance(model, DecoderLM) else []
    handles = [each.register_forward_pre_hook(lambda _, args: found.append(args[0])) for each in layers]
    handles += [each.register_forward_hook(lambda _, args, output: found.append(output)) for each in layers[-1:]]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def pass_of_drafting(
    runner: Runner, feeds: Sequence[Feed], *, references: bool = False, disturbance: Disturbance | None = None
) -> tuple[Tensor, Tensor]:
    """Return the hidden states and the logits, in float32, of all positions of some texts.

    Args:
        runner: the drafting model's.
        feeds: the inputs for each text.
        references: whether operations run their references, which a model that ranks share cannot.
        disturbance: moves the results of the references by about one rounding.
    """
    model, backend, spec = runner.model, runner.backend, runner.spec
    sizes = [spec.blocks_for(len(each.tokens)) for each in feeds]
    starts = [DUMMY_BLOCK + 1 + sum(sizes[:index]) for index in range(len(sizes))]
    spec = attrs.evolve(spec, num_blocks=DUMMY_BLOCK + 1 + sum(sizes))
    with runner.running():
        states = canonical_states(spec, backend.device.torch) if references else backend.allocate(spec)
        hidden = [each.hidden for each in feeds if each.hidden is not None]
        batch = model.batch_type.build(
            [each.tokens for each in feeds],
            [range(start, start + size) for start, size in zip(starts, sizes, strict=True)],
            block_size=spec.block_size,
            device=backend.device.torch,
            fields={"hidden_states": torch.cat(hidden)} if hidden else {},
        )
        with _on_references(runner, references, disturbance):
            hidden_states, *_ = flat_outputs(model, model(batch, states.layers))
            return hidden_states, model.logits(hidden_states).float()


@contextmanager
def _on_references(runner: Runner, references: bool, disturbance: Disturbance | None) -> Iterator[None]:
    if not references:
        yield
        return
    own = frozenset(map(id, [*runner.model.parameters(), *runner.model.buffers()]))

    def wrap(operation: Operation, kernel: Any) -> Any:
        def reference(*args: Any) -> Any:
            plain = [runner.backend.plain_weight(each) if id(each) in own else each for each in args]
            found = operation.reference(*plain)
            return found if disturbance is None else tree_map_only(Tensor, disturbance.moved, found)

        return reference

    with ops.intercepted(wrap):
        yield
