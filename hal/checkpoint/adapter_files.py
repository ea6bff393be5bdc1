"""Adapters (LoRA) as PEFT saves them: adapter_config.json and adapter_model.safetensors in a folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
from torch import Tensor

from hal.checkpoint.safetensors_files import ADAPTER, FLOATS, TensorInfo, read_tensors, tensors_of
from hal.config.untrusted_files import AGAIN, is_there, read_json
from hal.errors import LISTED, CheckpointError
from hal.quantization.layer_patterns import LayerPattern

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT writes before the names of the model's modules."""
LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"

_COMPUTED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"})
_DESCRIBING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Keys that say how an adapter was trained, or how PEFT runs it; the tensors say where it is."""
_MERGE = "save the merged model (merge_and_unload in peft), or train an adapter without it"


N = TypeVar("N", int, float)


@attrs.frozen
class AdapterFiles:
    """An adapter's configuration and the infos of its tensors.

    Attributes:
        folder: where its files are.
        rank: the rank of projections that ``rank_pattern`` does not name.
        alpha: likewise the numerator of the scale.
        rooted: whether the scale is divided by the root of the rank (rsLoRA).
        ranks: ranks by pattern of module names.
        alphas: numerators by pattern.
        tensors: the tensors, by name without PEFT's prefix.
    """

    folder: Path
    rank: int
    alpha: float
    rooted: bool
    ranks: Sequence[tuple[LayerPattern, int]]
    alphas: Sequence[tuple[LayerPattern, float]]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, folder: str | Path) -> AdapterFiles:
        """Read the configuration, and the names and shapes of the tensors.

        Raises:
            CheckpointError: a file is missing or damaged, the configuration has a key that hal does not compute, or
                there is a tensor that no LoRA has.
        """
        folder = Path(folder)
        if not is_there(folder / ADAPTER):
            raise CheckpointError(
                f"{folder} is no adapter: it has no {ADAPTER}", "give the folder that save_pretrained of peft wrote"
            )
        config = read_json(folder / ADAPTER)
        _check(config, folder / ADAPTER)
        if not is_there(folder / WEIGHTS):
            raise CheckpointError(f"{folder} has no {WEIGHTS}", "save the adapter with safe_serialization=True")
        tensors = {name.removeprefix(PREFIX): info for name, info in _stored(folder / WEIGHTS).items()}
        found = cls(
            folder,
            config["r"],
            float(config["lora_alpha"]),
            bool(config.get("use_rslora")),
            _patterns(config, "rank_pattern"),
            _patterns(config, "alpha_pattern"),
            tensors,
        )
        found._check_tensors(config.get("target_modules"))
        return found

    @property
    def modules(self) -> list[str]:
        """The names of the projections that it changes."""
        return sorted({name.removesuffix(f".{LORA_A}") for name in self.tensors if name.endswith(f".{LORA_A}")})

    @property
    def largest_rank(self) -> int:
        """The largest rank of a projection."""
        return max(map(self.rank_of, self.modules), default=self.rank)

    @property
    def changes_experts(self) -> bool:
        """Whether it changes routed experts, each of which is a module with a number."""
        return any(re.search(r"\.experts\.\d+\.", module) for module in self.modules)

    def rank_of(self, module: str) -> int:
        """Return the rank of a projection, as the configuration says."""
        return _matched(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a projection's product."""
        rank, alpha = self.rank_of(module), _matched(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rooted else rank)

    def read(self) -> dict[str, Tensor]:
        """Return the tensors by name.

        Raises:
            CheckpointError: one has a number that is not finite.
        """
        found = {name: tensor.clone() for name, tensor in read_tensors(self.tensors)}
        for name, tensor in found.items():
            if not tensor.isfinite().all():
                raise CheckpointError(f"{name} in {self.folder} has a number that is not finite", AGAIN)
        return found

    def _check_tensors(self, targets: Any) -> None:
        for name, info in self.tensors.items():
            module, kind = _split(name)
            other = f"{module}.{LORA_A if kind == LORA_B else LORA_B}"
            if not kind or other not in self.tensors or not info.is_floating_point or len(info.shape) != 2:
                raise CheckpointError(
                    f"{self.folder} has the tensor {name} of {info.dtype} {list(info.shape)}, which is no {LORA_A} or "
                    f"{LORA_B} of two dimensions in {', '.join(sorted(FLOATS))} beside the other",
                    _MERGE,
                )
            found = info.shape[0 if kind == LORA_A else 1]
            if found != self.rank_of(module):
                raise CheckpointError(
                    f"{name} in {self.folder} has the rank {found}, and {ADAPTER} says {self.rank_of(module)}",
                    "check that both files belong together",
                )
        modules = self.modules
        if not modules:
            raise CheckpointError(f"{self.folder / WEIGHTS} has no tensors", AGAIN)
        for target in targets if isinstance(targets, list) else ():
            if not any(module == target or module.endswith(f".{target}") for module in modules):
                raise CheckpointError(
                    f"{ADAPTER} in {self.folder} has {target!r:.70} in target_modules, and {WEIGHTS} no tensor of it",
                    "check that both files belong together",
                )


def _stored(file: Path) -> dict[str, TensorInfo]:
    return {name: attrs.evolve(info, stored=name) for name, info in tensors_of(file)}


def _split(name: str) -> tuple[str, str]:
    """Return the module of a tensor and which of the two it is; empty for another tensor."""
    for kind in (LORA_A, LORA_B):
        if name.endswith(f".{kind}"):
            return name.removesuffix(f".{kind}"), kind
    return name, ""


def _patterns(config: Mapping[str, Any], key: str) -> list[tuple[LayerPattern, Any]]:
    """Return values by pattern of the ends of module names, as PEFT matches them."""
    return [(LayerPattern(rf"(?:.*\.)?(?:{text})$", key), value) for text, value in (config.get(key) or {}).items()]


def _matched(patterns: Sequence[tuple[LayerPattern, N]], module: str, otherwise: N) -> N:
    """Return the value of the first pattern that matches a module's name."""
    return next((value for pattern, value in patterns if pattern.match(module)), otherwise)


def _check(config: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError if a configuration is malformed, or asks for what hal does not compute."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file} has peft_type {config.get('peft_type')!r:.70}", "use an adapter of type LORA")
    asked = [
        key
        for key, value in config.items()
        if key not in _COMPUTED | _DESCRIBING and value not in (None, False, "none", [], {}, "")
    ]
    if asked:
        shown = ", ".join(f"{key}={config[key]!r:.70}" for key in asked[:LISTED])
        raise CheckpointError(f"{file} has {shown}, which hal does not compute", _MERGE)
    patterns = [config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
    tables = all(isinstance(each, dict) for each in patterns)
    ranks = [config.get("r"), *(patterns[0].values() if tables else [None])]
    alphas = [config.get("lora_alpha"), *(patterns[1].values() if tables else [])]
    if not (
        all(type(rank) is int and rank > 0 for rank in ranks) and all(type(alpha) in (int, float) for alpha in alphas)
    ):
        raise CheckpointError(
            f"{file} has r={config.get('r')!r:.70}, lora_alpha={config.get('lora_alpha')!r:.70}, "
            f"rank_pattern={patterns[0]!r:.70} and alpha_pattern={patterns[1]!r:.70}",
            "give positive integers as ranks, numbers as alphas, and tables of them by regular expression",
        )
