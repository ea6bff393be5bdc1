"""A program that imports torch as the environment would without hal, and writes its build to the given file."""

import json
import sys
from pathlib import Path

import torch

accelerator = torch.accelerator.current_accelerator()
facts = {
    "version": torch.__version__,
    "git_version": torch.version.git_version or "",
    "debug": torch.version.debug,
    "accelerator": accelerator and accelerator.type,
    "config": torch.__config__.show(),
}
Path(sys.argv[1]).write_text(json.dumps(facts), encoding="utf-8")
