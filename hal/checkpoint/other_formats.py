"""Errors for a path that is no checkpoint in safetensors: what it is, and how to get one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hal.errors import CheckpointError

SAFETENSORS = "hal reads safetensors only"
ORIGINAL = "download the model that the file was made from, in safetensors; the file's page usually names it"
FORMATS = {
    "a GGUF file": (("*.gguf", "*.ggml"), ORIGINAL),
    "an ONNX file": (("*.onnx",), ORIGINAL),
    "a TensorFlow or Flax file": (("*.h5", "*.msgpack"), ORIGINAL),
    "a NumPy file": (("*.npz", "*.npy"), "save them as safetensors, with safetensors.numpy.save_file"),
}
"""What a file is, to the patterns of such files, and how to get a checkpoint in safetensors."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
    elif HUB_NAME.fullmatch(str(path)):
        name = path.name
        return CheckpointError(
            problem,
            f"give the path of a checkpoint's folder; a model of the Hugging Face Hub is downloaded with "
            f"`hf download {path} --local-dir {name}`, and its path is then {name}",
        )
    return CheckpointError(problem, "give the path of a checkpoint's folder")


def no_safetensors(folder: Path) -> CheckpointError:
    """Return the error for a folder without a safetensors file, or without a config.json."""
    for pattern in PICKLES:
        for file in sorted(folder.glob(pattern)):
            return _pickle(file, folder)
    for name, (patterns, remedy) in FORMATS.items():
        for pattern in patterns:
            for file in sorted(folder.glob(pattern)):
                return CheckpointError(f"{folder} holds its weights in {name} ({file.name}), and {SAFETENSORS}", remedy)
    return CheckpointError(
        f"{folder} is no checkpoint: it has no safetensors file", "give the folder that contains the weights"
    )


def _pickle(file: Path, folder: Path) -> CheckpointError:
    into = f"{folder.absolute().name}-safetensors"
    return CheckpointError(
        f"{folder} holds its weights as a pickle ({file.name}), which can run any code when loaded",
        "download the model in safetensors; or, on an isolated machine with transformers, convert it: python -c "
        f"\"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}', dtype='auto')"
        f".save_pretrained('{into}')\", and copy the tokenizer's files",
    )
