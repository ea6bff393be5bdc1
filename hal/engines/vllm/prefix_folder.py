"""A folder in which vLLM instances leave the prefixes that they have computed for others, such as in shared memory."""

from __future__ import annotations

import hashlib
import logging
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

import hal
from hal.errors import ConfigError, ModelError
from hal.execution.prefix_transfer import CachedPrefix, PrefixForm
from hal.step import SEQUENCE

log = logging.getLogger("vllm.hal")


@attrs.frozen
class PrefixFolder:
    """Prefixes in files, each named by a digest of its form and tokens.

    Attributes:
        path: the folder.
        form: the form of the prefixes that are looked for and kept here. Others may be there, too.
        block_size: the tokens of a block. A prefix has whole blocks.
        most: the most bytes of the folder. The oldest prefixes give way.
    """

    path: Path
    form: PrefixForm
    block_size: int
    most: int

    @classmethod
    def of(cls, runner: hal.Runner, options: Mapping[str, Any]) -> Self:
        """Return the folder of a runner's prefixes.

        Args:
            options: vLLM's ``kv_connector_extra_config``.

        Raises:
            ConfigError: as :meth:`hal.execution.prefix_transfer.PrefixForm.of`.
            ModelError: layers have windows, before which vLLM frees the blocks, or keep states per sequence.
        """
        states = [state for layer in runner.model.states for state in layer.values()]
        if any(each.per is SEQUENCE or each.window is not None for each in states):
            raise ModelError(
                f"{type(runner.model).__name__} has layers with windows or with states per sequence, whose prefixes do "
                "not travel in vLLM",
                "start vLLM without kv_transfer_config",
            )
        size = runner.spec.block_size
        return cls(Path(options["folder"]), PrefixForm.of(runner), size, int(options.get("bytes", 1 << 30)))

    def shared(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens of a prompt that others need not compute: whole blocks, without the last token."""
        return list(prompt[: (len(prompt) - 1) // self.block_size * self.block_size])

    def find(self, prompt: Sequence[int], known: int) -> CachedPrefix | None:
        """Return the longest prefix of a prompt that has more than ``known`` tokens; None if there is none.

        One that is damaged, or is not what its name says, is none: a warning names it.
        """
        tokens = self.shared(prompt)
        names = self._names(tokens)
        for index in reversed(range(known // self.block_size, len(names))):
            file = self.path / names[index]
            if file.exists():
                try:
                    prefix = CachedPrefix.from_bytes(file.read_bytes())
                    self.form.check(prefix)
                    if prefix.tokens != tuple(tokens[: (index + 1) * self.block_size]):
                        raise ConfigError("the prefix is of other tokens", "remove the file")
                except (ConfigError, OSError) as error:
                    log.warning("hal computes a prompt, since %s is of no use: %s", file, error)
                else:
                    return prefix
        return None

    def has(self, tokens: Sequence[int]) -> bool:
        """Return whether a prefix is there."""
        return (self.path / self._names(tokens)[-1]).exists()

    def keep(self, prefix: CachedPrefix) -> int:
        """Write a prefix, and return its bytes. Others see it when it is whole."""
        data, name = prefix.to_bytes(), self._names(prefix.tokens)[-1]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            part = self.path / f"{name}.{os.getpid()}"
            part.write_bytes(data)
            part.replace(self.path / name)
        except OSError as error:
            log.warning("hal leaves no prefix in %s: %s", self.path, error)
            return 0
        return len(data)

    def _make_room(self, needed: int) -> None:
        files = [(each.stat(), each.path) for each in os.scandir(self.path)]
        used = sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda each: each[0].st_mtime_ns):
            if used + needed <= self.most:
                return
            Path(path).unlink(missing_ok=True)
            used -= stat.st_size

    def _names(self, tokens: Sequence[int]) -> list[str]:
        """Return the names of the prefixes of tokens, one for each block."""
        digest, names = hashlib.sha256(f"{self.form.model} {sorted(self.form.states.items())}".encode()), []
        for start in range(0, len(tokens), self.block_size):
            digest.update(array("q", tokens[start : start + self.block_size]).tobytes())
            names.append(digest.copy().hexdigest())
        return names
