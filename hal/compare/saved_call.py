"""A saved call: its arguments and both results as safetensors, and the data to replay it as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hal import ops
from hal.compare.call_comparison import Evidence, memory_of, transplant
from hal.compare.comparison_results import CompareError
from hal.config import parse_json
from hal.errors import ConfigError
from hal.ops import Operation

CALL, TENSORS = "call.json", "call.safetensors"
SIDES = ("first", "second")


def check_folder(folder: Path) -> None:
    """Check that a folder can be created and contains no saved call.

    Raises:
        ConfigError: the parent does not exist, or the folder contains a call.
    """
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"the parent folder of {folder} does not exist", "create it first")
    if (folder / CALL).exists():
        raise ConfigError(f"{folder} already contains a saved call", "use another folder, or remove it")


def save(evidence: Evidence, backends: tuple[str, str], dtype: torch.dtype, folder: Path) -> None:
    """Create ``folder`` and write ``call.json`` and ``call.safetensors`` into it.

    Tensors are named ``SIDE.argument.NAME`` and ``SIDE.result.NAME``. An argument that is equal on both sides is
    written once, for the first. Weights that a backend prepared and caches with different layouts are written for each
    side. A non-contiguous argument is written as the memory that it spans, including gaps: a kernel may read those.

    Raises:
        CompareError: a file cannot be written, for example because the disk is full.
    """
    tensors: dict[str, Tensor] = {}
    arguments = [
        _described(name, value, evidence.second_arguments[name], tensors)
        for name, value in evidence.first_arguments.items()
    ]
    for side, results in zip(SIDES, (evidence.first_results, evidence.second_results), strict=True):
        tensors |= {f"{side}.result.{name}": result.contiguous().clone() for name, result in results.items()}
    call = {
        "version": 1,
        "backends": list(backends),
        "dtype": str(dtype).removeprefix("torch."),
        **attrs.asdict(evidence.call),
        "arguments": arguments,
    }
    try:
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / TENSORS)
        (folder / CALL).write_text(json.dumps(call, indent=1) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CompareError(f"{folder} cannot be written: {error}", "free disk space, or use another folder") from error


def _described(name: str, first: Any, second: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if isinstance(first, torch.dtype):
        return {"name": name, "dtype": str(first).removeprefix("torch.")}
    if attrs.has(type(first)):
        return {"name": name, "options": attrs.asdict(first)}
    if not isinstance(first, Tensor):
        return {"name": name, "value": first}
    alike = first.dtype == second.dtype and first.stride() == second.stride() and torch.equal(first, second)
    layouts = {}
    for side, tensor in zip(SIDES, (first,) if alike else (first, second), strict=False):
        tensors[f"{side}.argument.{name}"] = memory_of(tensor).clone()
        layouts[side] = {"shape": list(tensor.shape), "strides": list(tensor.stride())}
    return {"name": name, "layouts": layouts}


@attrs.frozen(eq=False)
class SavedCall:
    """A saved call.

    Attributes:
        about: content of call.json.
    """

    operation: Operation
    about: dict[str, Any]
    _tensors: dict[str, Tensor]

    @classmethod
    def load(cls, folder: str | Path) -> SavedCall:
        """Read a folder that ``hal compare --save`` wrote.

        Raises:
            ConfigError: the folder contains no saved call.
        """
        folder = Path(folder)
        try:
            text, tensors = (folder / CALL).read_text(encoding="utf-8"), load_file(folder / TENSORS)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{folder} contains no saved call: {error}", "use a folder written by `hal compare --save`"
            ) from None
        about = dict(parse_json(text, str(folder / CALL)))
        return cls(ops.operation(about["operation"]), about, tensors)

    def arguments(self, side: str, device: torch.device | str = "cpu") -> list[Any]:
        """Return the arguments by position, with their original strides, in tensors that may be mutated.

        Args:
            side: ``first`` or ``second``; selects the weights and caches.
            device: device of all arguments except host values, which stay on the CPU.
        """
        return [self._argument(each, side, torch.device(device)) for each in self.about["arguments"]]

    def results(self, side: str) -> dict[str, Tensor]:
        """Return the results of the call on a side by name, and the mutated arguments by argument name."""
        prefix = f"{side}.result."
        return {name.removeprefix(prefix): tensor for name, tensor in self._tensors.items() if name.startswith(prefix)}

    def _argument(self, described: dict[str, Any], side: str, device: torch.device) -> Any:
        name = described["name"]
        if "dtype" in described:
            return getattr(torch, described["dtype"])
        if "options" in described:
            return self.operation.node_form.options(**described["options"])  # type: ignore[misc]
        if "layouts" not in described:
            return described["value"]
        side = side if side in described["layouts"] else "first"
        layout, memory = described["layouts"][side], self._tensors[f"{side}.argument.{name}"]
        tensor = memory.as_strided(layout["shape"], layout["strides"])
        return transplant(tensor, torch.device("cpu") if name in self.operation.host else device)
