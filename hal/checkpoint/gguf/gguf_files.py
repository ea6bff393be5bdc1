"""A checkpoint in a GGUF file. Its weights are dequantized as they are read, some rows at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from hal.checkpoint.checkpoint_files import CheckpointFiles
from hal.checkpoint.gguf.families import Source, read_family
from hal.checkpoint.gguf.gguf_header import GgufHeader
from hal.checkpoint.gguf.gguf_tokenizer import GgufTokenizer
from hal.checkpoint.gguf.metadata import Metadata
from hal.checkpoint.gguf.tensor_types import Part, Rows
from hal.checkpoint.safetensors_files import TensorInfo, TensorSlice
from hal.errors import CheckpointError

READ_BYTES = 8 << 20
"""The most bytes of values that are dequantized at once."""
SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""The keys of recommended sampling parameters."""
PART = "#"
"""Between the name of a tensor, and the part of it that is read without dequantizing it."""
GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"


class GgufFiles(CheckpointFiles):
    """A GGUF file, or the files of a split one.

    Args:
        path: the file, or one of them.

    Attributes:
        path: the file, or the first.
        config: what the metadata say, under the keys of config.json.
        tensors: the tensors, with the names and the order of rows of a checkpoint in safetensors. They are float32,
            whatever the file stores.

    Raises:
        CheckpointError: a file is damaged, or of a kind that hal does not read.
        ConfigError: the package ``gguf`` is not installed.
    """

    def __init__(self, path: Path) -> None:
        header = GgufHeader.open(path)
        self.path, self._metadata = header.path, Metadata(header.path, header.metadata)
        self.config, self._sources = read_family(header, self._metadata)
        self.tensors = {name: TensorInfo(each.tensor.file, each.shape, "F32") for name, each in self._sources.items()}

    @property
    def has_tokenizer(self) -> bool:
        """Whether the metadata have a vocabulary."""
        return "tokenizer.ggml.tokens" in self._metadata

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the metadata describe."""
        if not self.has_tokenizer:
            raise CheckpointError(f"{self.path} has no tokenizer", "use a GGUF file with one, or give token ids")
        return self._vocabulary.build()

    def json(self, name: str) -> Mapping[str, Any]:
        """Return what a JSON file beside config.json would have."""
        if name not in (GENERATION, TOKENIZER) or not self.has_tokenizer:
            return {}
        vocabulary, metadata = self._vocabulary, self._metadata
        if name == TOKENIZER:
            return vocabulary.config()
        sampling: dict[str, Any] = {each: metadata.number(key) for each, key in SAMPLING.items() if key in metadata}
        return {"eos_token_id": vocabulary.endings(), **sampling}

    def write_beside(self, folder: Path) -> None:
        """Write the tokenizer, the templates and the stop tokens as files of a folder."""
        if self.has_tokenizer:
            self.tokenizer().save(str(folder / "tokenizer.json"))
            for name in (GENERATION, TOKENIZER):
                (folder / name).write_text(json.dumps(self.json(name), indent=2) + "\n", encoding="utf-8")

    def read(self, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors."""
        for name, info in tensors.items():
            yield name, torch.cat(list(self.rows(name, info)))

    def rows(self, name: str, info: TensorInfo) -> Iterator[Tensor]:
        """Yield ranges of rows of a tensor."""
        whole = TensorSlice(name, tuple((0, size) for size in info.shape))
        for *_, values in self.read_slices([whole], {name: info}):
            yield values

    def read_slices(
        self, wanted: Sequence[TensorSlice], tensors: Mapping[str, TensorInfo]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield slices, large ones in several ranges of rows.

        Raises:
            CheckpointError: a scale in a block is not finite, or a file became shorter.
        """
        by_file: dict[Path, list[int]] = {}
        for place, each in enumerate(wanted):
            by_file.setdefault(tensors[each.name].file, []).append(place)
        for file, places in by_file.items():
            with Rows(file) as rows:
                for place in places:
                    stored = tensors[wanted[place].name].stored or wanted[place].name
                    name, _, part = stored.partition(PART)
                    read = partial(rows.read_part, cast(Part, part)) if part else rows.read
                    source = self._sources[name]
                    for start, values in _slices(source, wanted[place], read):
                        if source.tensor.type.block > 1 and values.is_floating_point():
                            _check_finite(values, f"{name} in {file}")
                        yield place, start, values

    def type_of(self, name: str) -> str:
        """Return the type of a tensor, such as ``Q4_0``."""
        return self._sources[name].tensor.type.name

    @cached_property
    def _vocabulary(self) -> GgufTokenizer:
        return GgufTokenizer(self._metadata, self.path, self.config["vocab_size"])


def _slices(source: Source, wanted: TensorSlice, read: Callable[..., Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield ranges of rows of a slice: the first row, relative to the slice, and the values.

    Args:
        read: reads rows, as :meth:`Rows.read <hal.checkpoint.gguf.tensor_types.Rows.read>` does.
    """
    (first, last), *others = wanted.taken
    kind, start = source.tensor.type, source.tensor.start
    if len(source.shape) == 1:
        whole = read(kind, start, 0, 1, source.shape[0])[0]
        yield 0, _in_halves(whole[:, None], source.heads)[first:last, 0] + source.offset
        return
    count, columns, inner = source.shape[0], source.shape[-1], math.prod(source.shape[1:-1])
    unit = count // source.heads if source.heads else 1  # Rows of a head are read together.
    step = max(1, READ_BYTES // (4 * columns * inner * unit)) * unit
    for begin in range(first - first % unit, max(last, first + 1), step):
        end = min(begin + step, count)
        values = read(kind, start, (source.first + begin) * inner, (end - begin) * inner, columns)
        values = values.view(end - begin, *source.shape[1:-1], values.shape[-1])
        values = _in_halves(values, (end - begin) // unit if source.heads else 0)
        kept = values[max(first - begin, 0) : min(last, end) - begin]
        kept = kept[(slice(None), *(slice(*each) for each in others))]
        yield max(begin - first, 0), kept + source.offset if source.offset else kept


def _check_finite(values: Tensor, what: str) -> None:
    """Raise CheckpointError unless scales are finite, or the values that have been computed from them."""
    if values.numel() and not bool(torch.stack(values.aminmax()).isfinite().all()):
        raise CheckpointError(f"{what} has blocks whose scale is not finite", "download it again")


def _in_halves(values: Tensor, heads: int) -> Tensor:
    """Return the rows of some heads, which are in the order of adjacent pairs, in that of halves."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else values
