"""The safetensors files of a checkpoint's folder, and their index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hal.checkpoint.other_formats import no_safetensors
from hal.config.untrusted_files import AGAIN, format_name, is_plain_name, is_there, read_json, regular_file
from hal.errors import LISTED, CheckpointError

Item = TypeVar("Item")

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
REMAP_BYTES = 32 << 20
"""A file is mapped again after at most this many bytes: pages that were read count as process memory until then."""
REMAPS = 128
"""A file is mapped again after this fraction of what is read in total, so that a small share stays small, too."""
LEAST_REMAP_BYTES = 1 << 20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The supported dtypes, by safetensors name. 8-bit ones are read only where a quantization scheme binds them."""
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
"""Dtypes of unscaled numbers, which can be rounded to one another."""


@attrs.frozen
class TensorInfo:
    """The file, shape and dtype of a tensor, whose values are read later.

    Attributes:
        stored: its name in the file; empty if that is the name by which the model knows it.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    stored: str = ""

    @property
    def nbytes(self) -> int:
        """The size on disk."""
        return math.prod(self.shape) * _itemsize(self)

    @property
    def is_floating_point(self) -> bool:
        """Whether it holds unscaled floating-point numbers. 8-bit ones have a scale."""
        return self.dtype in FLOATS


def _index(folder: Path) -> Path | None:
    """Return the index of a folder, or None. ModelSlim names the index after its weight files."""
    if is_there(folder / INDEX):
        return folder / INDEX
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} index files: {', '.join(file.name for file in found)}",
            "remove all but the current one",
        )
    return found[0] if found else None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files with the weights: those in the index, or the only one.

    Raises:
        CheckpointError: no file exists, one is missing, several exist without an index, or there is an adapter.
    """
    if is_there(folder / ADAPTER):
        raise CheckpointError(
            f"{folder} holds an adapter ({ADAPTER})",
            "give the folder of its base model, and the adapter's with adapters= of hal.LLM; or save the merged model "
            "(merge_and_unload in peft), or remove the adapter's files to run the model without",
        )
    index = _index(folder)
    if index is not None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map", AGAIN)
        names = sorted(set(weight_map.values()))
        # A name that contains a path could point anywhere on the machine.
        if outside := [name for name in names if not (is_plain_name(name) and name.endswith(".safetensors"))]:
            raise CheckpointError(
                f"{index.name} names {format_name(outside[0])}, which is no safetensors file of the folder", AGAIN
            )
        if missing := [name for name in names if not is_there(folder / name)]:
            listed = ", ".join(map(format_name, missing[:LISTED]))
            more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
            raise CheckpointError(f"{folder} lacks {listed}{more}, which {index.name} names", "download it again")
        if is_there(folder / WHOLE) and WHOLE not in names:  # Of the two, engines read one or the other.
            raise CheckpointError(
                f"{folder} holds {WHOLE} and {index.name}, which names other files",
                f"remove {WHOLE} if the files of the index are current; else remove {index.name}",
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        others = [format_name(file.name) for file in files if file.name != WHOLE]
        more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
        raise CheckpointError(
            f"{folder} holds {len(files)} safetensors files and no {INDEX}",
            "save it again, or add the index"
            if len(others) == len(files)
            else f"remove {', '.join(others[:LISTED])}{more} if {WHOLE} has all weights; else remove {WHOLE}, and save "
            "the others again, or add the index",
        )
    raise no_safetensors(folder)


def _opened(file: Path) -> Any:
    regular_file(file)
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", f"it may be truncated; {AGAIN}") from None


def tensors_of(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the names and infos of a safetensors file's tensors.

    Raises:
        CheckpointError: the file is damaged, or holds an unsupported dtype.
    """
    with _opened(file) as handle:
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            part = handle.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise CheckpointError(
                    f"{name} in {file} has the dtype {part.get_dtype()}, which hal does not read",
                    f"use a checkpoint in one of {', '.join(DTYPES)}",
                )
            yield name, TensorInfo(file, tuple(part.get_shape()), part.get_dtype())


def read_tensors(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, file by file, as CPU tensors mapped from disk: copy each before the next."""
    by_file: dict[Path, list[tuple[str, int]]] = {}
    for name, info in tensors.items():
        by_file.setdefault(info.file, []).append((name, info.nbytes))
    for file, names in by_file.items():
        for group in _grouped(names):
            with _opened(file) as handle:
                for name in group:
                    yield name, handle.get_tensor(tensors[name].stored or name)


@attrs.frozen
class TensorSlice:
    """A part of a tensor: an interval of each dimension."""

    name: str
    taken: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(stop - start for start, stop in self.taken).numel()


def read_slices(wanted: Sequence[TensorSlice], tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield slices file by file, large ones in several ranges of rows. Reads nothing else of a file.

    Args:
        tensors: the infos of their tensors.

    Yields:
        The index of a slice in ``wanted``, the first row of the range, and the rows: a CPU tensor mapped from disk,
        which must be copied before the next is taken.
    """
    total = sum(each.numel * _itemsize(tensors[each.name]) for each in wanted)
    limit = min(REMAP_BYTES, max(LEAST_REMAP_BYTES, total // REMAPS))
    by_file: dict[Path, list[tuple[tuple[int, int, int], int]]] = {}
    for place, each in enumerate(wanted):
        info = tensors[each.name]
        by_file.setdefault(info.file, []).extend(
            ((place, start, stop), (stop - start) * _row_bytes(info))
            for start, stop in _row_ranges(each.taken, info, limit)
        )
    for file, parts in by_file.items():
        for group in _grouped(parts, limit):
            with _opened(file) as handle:
                for place, start, stop in group:
                    yield place, start, _values(handle, wanted[place], tensors[wanted[place].name], start, stop)


def read_rows(name: str, info: TensorInfo) -> Iterator[Tensor]:
    """Yield ranges of rows of the tensor ``name``. Tensors of one shape have the same ranges."""
    stored = info.stored or name
    if not info.shape:
        with _opened(info.file) as handle:
            yield handle.get_tensor(stored)
        return
    rows = max(1, REMAP_BYTES // (8 * max(1, math.prod(info.shape[1:]))))
    for start in range(0, info.shape[0], rows):
        with _opened(info.file) as handle:
            yield handle.get_slice(stored)[start : start + rows]


def _itemsize(info: TensorInfo) -> int:
    return DTYPES[info.dtype].itemsize


def _row_bytes(info: TensorInfo) -> int:
    """Return the bytes of a whole row on disk, whose pages are mapped even if only part of it is read."""
    return math.prod(info.shape[1:]) * _itemsize(info)


def _row_ranges(taken: tuple[tuple[int, int], ...], info: TensorInfo, limit: int) -> Iterator[tuple[int, int]]:
    count = taken[0][1] - taken[0][0] if taken else 1
    rows = max(1, limit // max(1, _row_bytes(info)))
    for start in range(0, max(1, count), rows):
        yield start, min(count, start + rows)


def _values(handle: Any, wanted: TensorSlice, info: TensorInfo, start: int, stop: int) -> Tensor:
    whole, stored = tuple((0, size) for size in info.shape), info.stored or wanted.name
    rows = ((wanted.taken[0][0] + start, wanted.taken[0][0] + stop), *wanted.taken[1:]) if wanted.taken else ()
    if rows == whole or 0 in info.shape:
        values: Tensor = handle.get_tensor(stored)
        return values[tuple(slice(*each) for each in rows)]
    found: Tensor = handle.get_slice(stored)[tuple(slice(*each) for each in rows)]
    return found


def _grouped(sized: Iterable[tuple[Item, int]], limit: int = REMAP_BYTES) -> Iterator[list[Item]]:
    """Yield items in groups. A group ends as soon as its bytes reach the limit. The file is mapped again after it."""
    group: list[Item] = []
    size = 0
    for item, nbytes in sized:
        group.append(item)
        size += nbytes
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group
