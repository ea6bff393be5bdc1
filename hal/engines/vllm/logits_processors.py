"""Custom logits processors with the interface of vLLM's second model runner.

They find a request's tokens by its slot, in tensors on the device. Those of the first model runner get lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hal.engines.vllm.request import Chosen, Place, Request
from hal.step import to_device


class _Column:
    """A number of each slot on the host and on the device, under the names of vLLM's interface."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.cpu, self.gpu = torch.zeros(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32, device=device)
        self.np = self.cpu.numpy()


class CustomProcessors:
    """The processors, and what they read: the slots of the requests that have begun, in vLLM's names.

    Args:
        vocab_size: the number of logits.
        slots: the most requests that have begun.
    """

    def __init__(self, vllm_config: Any, device: torch.device, vocab_size: int, slots: int) -> None:
        from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors  # from vLLM 0.31 on

        model = vllm_config.model_config
        self.device, self.vocab_size, self.max_num_reqs = device, vocab_size, slots
        tokens = torch.zeros(slots, model.max_model_len, dtype=torch.int32, device=device)
        self.all_token_ids = SimpleNamespace(gpu=tokens)
        self.prompt_len, self.prefill_len, self.total_len = (_Column(slots, device) for _ in range(3))
        self._made = build_custom_logits_processors(vllm_config, self, False, model.logits_processors or ())
        self._slots: dict[Request, int] = {}
        self._free = [*range(slots)]
        self._changed: set[Request] = set()  # requests whose logits some processor changes

    @classmethod
    def of(cls, vllm_config: Any, device: torch.device, vocab_size: int, slots: int) -> Self | None:
        """Return the processors that vLLM's second model runner would have; None for none."""
        asked = vllm_config.model_config.logits_processors or entry_points(group="vllm.logits_processors")
        return cls(vllm_config, device, vocab_size, slots) if vllm_config.use_v2_model_runner and asked else None

    def take(self, chosen: Sequence[Chosen]) -> None:
        """Take in the requests of a step, and their tokens so far."""
        requests, written = [each for each in chosen if isinstance(each, Request)], list[tuple[int, int, int]]()
        for each in requests:
            slot, total = self._slots.get(each), len(each.prompt) + len(each.outputs)
            if slot is None:
                slot = self._slots[each] = self._free.pop()
                self.prompt_len.np[slot], self.prefill_len.np[slot] = len(each.prompt), total
                self.total_len.np[slot] = 0
                changes = [made.add_request(slot, each.params) for made in self._made]
                if any(changes):
                    self._changed.add(each)
            known = int(self.total_len.np[slot])
            new = each.tokens if not known else each.outputs[known - len(each.prompt) :]
            written += [(slot, place, token) for place, token in enumerate(new, known)]
            self.total_len.np[slot] = total
        if written:
            slots, places, tokens = to_device(written, self.device).unbind(-1)
            self.all_token_ids.gpu[slots, places] = tokens.int()
        for column in (self.prompt_len, self.prefill_len, self.total_len):
            column.gpu.copy_(column.cpu)
        for made in self._made:
            made.apply_staged_writes()

    def end(self, request: Request) -> None:
        """Forget a request, which has ended or starts anew."""
        if (slot := self._slots.pop(request, None)) is not None:
            self._free.append(slot)
            self._changed.discard(request)

    def apply(self, logits: Tensor, chosen: Sequence[Chosen]) -> Tensor:
        """Return the logits that the processors make of a step's.

        Args:
            logits: ``[rows, vocabulary]``, float32.
            chosen: what each row is for.
        """
        from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

        requests = [each.request if isinstance(each, Place) else each for each in chosen]
        if self._changed.isdisjoint(requests):
            return logits
        lengths = [len(each.prompt) + len(each.outputs) for each in chosen]
        first = [row for row, each in enumerate(chosen) if isinstance(each, Request)]
        ends = [*first[1:], len(chosen)]
        slots = np.array([self._slots[each] for each in requests])
        local = [row - begin for begin, end in zip(first, ends, strict=True) for row in range(begin, end)]
        tokens = [(each.outputs or each.prompt)[-1] for each in chosen]
        expanded, places, inputs, positions = to_device(
            np.array([slots, local, tokens, [each - 1 for each in lengths]]), self.device
        )
        context = LogitsContext(
            expanded_idx_mapping=expanded,
            idx_mapping=to_device(slots[first], self.device),
            idx_mapping_np=slots[first],
            expanded_local_pos=places.int(),
            input_ids=inputs.int(),
            pos=positions,
            seq_lens_upper_bound_np=np.array([lengths[end - 1] for end in ends], np.int32),
        )
        for made in self._made:
            logits = made.apply(logits, context)
        return logits
