"""The adapters (LoRA) of vLLM's requests, which vLLM numbers, in the slots of the model's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm.lora.request import LoRARequest

import hal
from hal.checkpoint.adapters import Adapters
from hal.errors import ConfigError


class LoadedAdapters:
    """The adapters that were added, or that a request has named. If none has room, the one used longest ago gives way.

    A request that runs on reads its adapter again after that, so that no slot is kept for it.

    Args:
        runner: of a model with room for adapters.
    """

    def __init__(self, runner: hal.Runner) -> None:
        self._backend = runner.backend
        self._adapters: Adapters = runner.model.adapters
        self._slots: dict[int, int] = {}  # by number, the one used last at the end
        self._pinned: set[int] = set()

    @property
    def numbers(self) -> set[int]:
        """The numbers of the loaded adapters."""
        return set(self._slots)

    def of_step(self, requests: Sequence[LoRARequest]) -> list[int]:
        """Return the slot of each request's adapter in a step. Those that are not loaded are.

        Raises:
            CheckpointError: an adapter's files are missing or damaged, or do not fit the model.
            ConfigError: its rank is too large, or the others in the slots are pinned.
        """
        numbers = [each.lora_int_id for each in requests]
        for number in dict.fromkeys(numbers):
            if number in self._slots:
                self._slots[number] = self._slots.pop(number)
        for request in requests:
            if request.lora_int_id not in self._slots:
                self.load(request, needed=numbers)
        return [self._slots[number] for number in numbers]

    def load(self, request: LoRARequest, *, needed: Collection[int] = ()) -> None:
        """Load an adapter, also in the place of that of its number.

        Args:
            needed: the numbers of others that keep their slots.

        Raises:
            CheckpointError, ConfigError: as :meth:`of_step`.
        """
        number, most = request.lora_int_id, self._backend.config.adapters.slots
        if number not in self._slots and len(self._slots) == most:
            free = next((each for each in self._slots if each not in self._pinned and each not in needed), None)
            if free is None:
                raise ConfigError(
                    f"all {most} slots of adapters are pinned or in use, and {request.lora_name!r:.70} needs one",
                    "raise max_cpu_loras, or remove a pinned adapter",
                )
            self.remove(free)
        self._backend.device.synchronize()  # The last step may still read the slot.
        self._adapters.load(str(number), request.lora_path)
        loaded = self._adapters.take(str(number))
        loaded.give_back()
        self._slots.pop(number, None)
        self._slots[number] = loaded.slot

    def add(self, request: LoRARequest) -> None:
        """Load an adapter unless it is loaded, or if ``load_inplace`` asks for it.

        Raises:
            CheckpointError, ConfigError: as :meth:`of_step`.
        """
        if request.load_inplace or request.lora_int_id not in self._slots:
            self.load(request)

    def remove(self, number: int) -> bool:
        """Remove an adapter, and return whether it was loaded."""
        self._pinned.discard(number)
        if self._slots.pop(number, None) is None:
            return False
        self._adapters.remove(str(number))
        return True

    def pin(self, number: int) -> None:
        """Keep an adapter in its slot until it is removed.

        Raises:
            ConfigError: it is not loaded.
        """
        if number not in self._slots:
            raise ConfigError(f"no adapter with the number {number} is loaded", "add it with add_lora first")
        self._pinned.add(number)
