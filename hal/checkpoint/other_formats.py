"""Errors for a path that is no checkpoint: what it is, and how to get one."""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

from hal.errors import LISTED, CheckpointError

SAFETENSORS = "hal reads safetensors from folders"
ORIGINAL = "download the model that the file was made from, in safetensors; the file's page usually names it"
FORMATS = {
    "a GGUF file": (
        ("*.gguf",),
        "give the path of the file instead of its folder's; of the hub, download it first, with `hf download`",
    ),
    "a GGML file": (("*.ggml",), ORIGINAL),
    "an ONNX file": (("*.onnx",), ORIGINAL),
    "a TensorFlow or Flax file": (("*.h5", "*.msgpack"), ORIGINAL),
    "a NumPy file": (("*.npz", "*.npy"), "save them as safetensors, with safetensors.numpy.save_file"),
}
"""What a file is, to the patterns of such files, and how to get a checkpoint in safetensors."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ADAPTER = "adapter_config.json"


def no_folder(path: Path) -> CheckpointError:
    """Return the error for a path that is no folder."""
    exists = os.path.exists(path)  # pathlib's raises for a path that is too long.
    problem = f"no checkpoint at {path}: found {'a file' if exists else 'nothing'}"
    if exists:
        if path.suffix == ".safetensors":
            return CheckpointError(problem, f"give the folder that holds it and its config.json: {path.parent}")
        for name, (patterns, remedy) in FORMATS.items():
            if any(path.match(pattern) for pattern in patterns):
                return CheckpointError(f"{path} is {name}, and {SAFETENSORS}", remedy)
        if any(path.match(pattern) for pattern in PICKLES):
            return _pickle(path, path.parent)
    elif close := close_path(path):
        problem += f" (did you mean {close}?)"
    return CheckpointError(
        problem,
        "give the path of a checkpoint's folder or GGUF file, or a model's name on the hub, such as Qwen/Qwen3-0.6B",
    )


def close_path(path: Path) -> Path | None:
    """Return the path beside this one that is most like it, or None."""
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        return None
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return path.with_name(close[0]) if close else None


def no_safetensors(folder: Path) -> CheckpointError:
    """Return the error for a folder without a safetensors file, or without a config.json."""
    inside = sorted(str(each.parent) for each in folder.glob("*/config.json"))
    if inside and not (folder / "config.json").exists():
        return CheckpointError(f"{folder} is no checkpoint, but holds some", f"give one: {', '.join(inside[:LISTED])}")
    return no_safetensors_among(sorted(each.name for each in folder.iterdir()), str(folder))


def no_safetensors_among(files: Sequence[str], where: str) -> CheckpointError:
    """Return the error for a folder or repository, by its name, that is no checkpoint in safetensors."""
    if ADAPTER in files:
        return CheckpointError(
            f"{where} is an adapter (LoRA) and no model: it holds changes to the weights of another",
            f"give the model that {ADAPTER} names as base_model_name_or_path; or merge the adapter into it, with "
            "merge_and_unload() of the package peft, and give the folder that you save",
        )
    for pattern in PICKLES:
        for file in fnmatch.filter(files, pattern):
            return _pickle(Path(file), Path(where))
    for name, (patterns, remedy) in FORMATS.items():
        for pattern in patterns:
            for file in fnmatch.filter(files, pattern):
                return CheckpointError(f"{where} holds its weights in {name} ({file}), and {SAFETENSORS}", remedy)
    missing = "config.json" if any(each.endswith(".safetensors") for each in files) else "safetensors file"
    return CheckpointError(
        f"{where} is no checkpoint: it has no {missing}", "give the folder that contains the weights and config.json"
    )


def _pickle(file: Path, folder: Path) -> CheckpointError:
    into = f"{folder.absolute().name}-safetensors"
    return CheckpointError(
        f"{folder} holds its weights as a pickle ({file.name}), which can run any code when loaded",
        "download the model in safetensors; or, on an isolated machine with transformers, convert it: python -c "
        f"\"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}', dtype='auto')"
        f".save_pretrained('{into}')\", and copy the tokenizer's files",
    )
