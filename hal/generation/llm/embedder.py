"""How texts become embeddings, as the files of sentence-transformers say.

They declare prompts, the cut of tokens, the pooling of hidden states, and further layers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from hal.checkpoint.checkpoint import Checkpoint
from hal.config.untrusted_files import is_plain_name, is_there, read_json, regular_file
from hal.errors import CheckpointError, ConfigError, nearest
from hal.generation.llm.prompts import Prompt, encoded_prompts, listed_prompts

MODULES = "modules.json"
MODES = {"cls": "first", "max": "max", "mean": "mean", "lasttoken": "last"}
"""The values of the key ``pooling_mode`` of a pooling's config.json, and what they take."""
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The older keys, and the values of ``pooling_mode`` that they stand for."""
PRECEDING: Mapping[str, tuple[str, ...]] = {
    "Transformer": ("",),
    "Pooling": ("Transformer",),
    "Dense": ("Transformer", "Pooling", "Dense", "Normalize"),
    "Normalize": ("Transformer", "Pooling", "Dense", "Normalize"),
    "Dropout": ("Transformer", "Pooling", "Dense", "Normalize"),
}
"""The kinds of modules, and those that may stand before each. A dropout does nothing here."""
LIBRARY = "sentence_transformers."
"""The beginning of the types of modules. Others are code of the checkpoint."""
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": functional.gelu,
}


@attrs.frozen(eq=False)
class Pooling:
    """How hidden states become an embedding.

    Attributes:
        mode: ``last`` or ``first`` token, or ``mean`` or ``max`` of all.
        layers: applied to the pooled vectors ``[texts, width]``, in order.
        include_prompt: whether the tokens of a prompt before the text count.
    """

    mode: str = "last"
    layers: tuple[Callable[[Tensor], Tensor], ...] = ()
    include_prompt: bool = True

    @classmethod
    def read(cls, folder: Path, dims: int | None = None) -> Pooling:
        """Read modules.json and what it names. Without it, the last token is taken.

        Args:
            dims: how many of the first dimensions an embedding has; None for all.

        Raises:
            CheckpointError: a file is damaged, or names a module, or an option of one, that hal does not have.
        """
        file = folder / MODULES
        mode, layers, include_prompt, last = "last", list[Callable[[Tensor], Tensor]](), True, ""
        for module in _modules(file) if is_there(file) else []:
            kind, path = module["type"].rpartition(".")[2], module["path"]
            if path and not is_plain_name(path):
                raise CheckpointError(
                    f"{file} names the folder {path!r:.60}, outside the checkpoint", "give a name in it"
                )
            if kind not in PRECEDING or not module["type"].startswith(LIBRARY):
                raise CheckpointError(
                    f"{file} has a module {module['type']!r:.80}, which hal does not have",
                    f"hal has {', '.join(PRECEDING)} of sentence-transformers",
                )
            if last not in PRECEDING[kind]:
                raise CheckpointError(
                    f"{file} has the module {kind} behind {last}", "give the model, one pooling, and then layers"
                )
            if kind == "Dropout":
                continue
            config, last = read_json(own) if path and is_there(own := folder / path / "config.json") else {}, kind
            if kind == "Pooling":
                mode, include_prompt = _mode(own, config), config.get("include_prompt") is not False
            elif kind == "Dense":
                layers.append(_dense(folder / path, config))
            elif kind == "Normalize":
                _check_options(own, config)
                layers.append(lambda x: functional.normalize(x, dim=-1))
        if dims is not None:
            layers.append(lambda x: x[:, :dims])
        return cls(mode, tuple(layers), include_prompt)

    def apply(self, pooled: Tensor) -> Tensor:
        """Return the embeddings of pooled vectors ``[texts, width]``, float32."""
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


def _modules(file: Path) -> list[dict[str, str]]:
    try:
        found: Any = json.loads(regular_file(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "download the checkpoint again") from None
    if not isinstance(found, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path"), str)
        for each in found
    ):
        raise CheckpointError(f"{file} is no list of modules with type and path", "download the checkpoint again")
    return found


def _mode(file: Path, config: Mapping[str, Any]) -> str:
    named = config.get("pooling_mode") or [name for flag, name in FLAGS.items() if config.get(flag)] or "mean"
    chosen = named if isinstance(named, list) else [named]
    if len(chosen) != 1 or (mode := str(chosen[0]).lower()) not in MODES:
        raise CheckpointError(f"{file} asks for the pooling {named!r:.80}", f"hal has one of: {', '.join(MODES)}")
    return MODES[mode]


def _check_options(file: Path, config: Mapping[str, Any]) -> None:
    """Check the options that a layer has beside its own: what it reads and writes."""
    for name in ("module_input_name", "module_output_name", "use_residual"):
        if config.get(name) not in (None, False, "sentence_embedding"):
            raise CheckpointError(
                f"{file} says {name} {config[name]!r:.60}, which hal does not follow",
                "hal has layers that read the pooled vector alone, and write it",
            )


def _dense(folder: Path, config: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    _check_options(folder / "config.json", config)
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{folder / 'config.json'} names the activation {name!r:.80}", f"hal has: {', '.join(ACTIVATIONS)}"
        )
    file = regular_file(folder / "model.safetensors")
    try:
        tensors = {key.removeprefix("linear."): each.float() for key, each in load_file(file).items()}
        weight, bias, activation = tensors["weight"], tensors.get("bias"), ACTIVATIONS[name]
    except Exception as error:  # safetensors raises several kinds
        raise CheckpointError(f"{file} cannot be read: {error}", "download the checkpoint again") from None
    if isinstance(stated := config.get("bias"), bool) and stated != (bias is not None):
        raise CheckpointError(
            f"{folder / 'config.json'} says bias {str(stated).lower()}, and {file.name} has "
            f"{'no' if stated else 'a'} bias",
            "correct the one that is wrong",
        )
    return lambda x: activation(functional.linear(x, weight, bias))


PROMPTS, TEXTS = "config_sentence_transformers.json", "sentence_bert_config.json"
KIND = "SentenceTransformer"
DEFAULT_PROMPTS = {"query": "", "document": ""}
"""The prompts that every checkpoint has; its file may write others under their names."""
NEUTRAL: Mapping[str, Any] = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
"""Values in sentence_bert_config.json that ask for what hal does, beside null and what is empty or false."""
NO_LIMIT = 1 << 31
"""A larger model_max_length stands for none."""

log = logging.getLogger("hal.generation")


@attrs.frozen
class TextRules:
    """How a text becomes tokens, and what remains of its embedding.

    Attributes:
        prompts: what precedes a text, by name.
        default_prompt: the name of the prompt that counts if none is given.
        lower_case: whether texts are written in lower case.
        most: the most tokens of a text, with special ones. The rest is cut.
        cut_at: the side at which it is cut, ``left`` or ``right``.
        dims: how many of the first dimensions an embedding has; None for all.
    """

    prompts: Mapping[str, str]
    default_prompt: str | None
    lower_case: bool
    most: int | None
    cut_at: str
    dims: int | None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> TextRules:
        """Read config_sentence_transformers.json, sentence_bert_config.json and tokenizer_config.json.

        Raises:
            CheckpointError: a file is damaged, or asks for something that hal does not do.
        """
        named, rules, tokens = map(checkpoint.files.json, (PROMPTS, TEXTS, "tokenizer_config.json"))
        prompts: Any = named.get("prompts") or {}
        if isinstance(prompts, Mapping):
            prompts = DEFAULT_PROMPTS | {name: text or "" for name, text in prompts.items()}
        default, dims, most = named.get("default_prompt_name"), named.get("truncate_dim"), rules.get("max_seq_length")
        if most is None and is_there(checkpoint.path / MODULES):
            most = tokens.get("model_max_length")
            most = int(most) if isinstance(most, int | float) and most < NO_LIMIT else None
        stated = [
            (PROMPTS, "model_type", named.get("model_type"), named.get("model_type") in (None, KIND)),
            (PROMPTS, "prompts", prompts, isinstance(prompts, dict) and {*map(type, prompts.values())} == {str}),
            (PROMPTS, "default_prompt_name", default, default is None or default in prompts),
            (PROMPTS, "truncate_dim", dims, dims is None or (type(dims) is int and dims > 0)),
            (TEXTS, "max_seq_length", most, most is None or (type(most) is int and most > 0)),
        ]
        stated += [(TEXTS, name, value, _is_neutral(name, value)) for name, value in rules.items()]
        for file, name, value, followed in stated:
            if not followed:
                raise CheckpointError(
                    f"{checkpoint.path / file} says {name} {value!r:.70}, which hal does not follow",
                    "remove the key if the embeddings do not need it",
                )
        cut_at = "left" if tokens.get("truncation_side") == "left" else "right"
        return cls(prompts, default, bool(rules.get("do_lower_case")), most, cut_at, dims)

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of a text that has its prompt."""
        if self.lower_case:
            text = text.lower()
        found = tokenizer.encode(text)
        if self.most is not None and len(found) > self.most:
            found = tokenizer.encode(text, add_special_tokens=False)
            log.info("a text is cut to %d tokens, as the checkpoint says", self.most)
            found.truncate(max(0, self.most - tokenizer.num_special_tokens_to_add(False)), direction=self.cut_at)
            found = tokenizer.post_process(found)
        return list(found.ids)


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a key of sentence_bert_config.json asks for what hal does."""
    if name == "modality_config" and isinstance(value, Mapping):
        return value.get("text") == {"method": "forward", "method_output_name": "last_hidden_state"}
    known = name in ("max_seq_length", "do_lower_case", "unpad_inputs")
    return known or not value or value == NEUTRAL.get(name)


class Embedder:
    """Reads what a checkpoint says of embeddings, when it is first needed. Threading: any thread may call it."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Callable[[], Tokenizer]) -> None:
        self._checkpoint, self._tokenizer = checkpoint, tokenizer

    @cached_property
    def pooling(self) -> Pooling:
        """How hidden states become an embedding."""
        return Pooling.read(self._checkpoint.path, self._rules.dims)

    @cached_property
    def _rules(self) -> TextRules:
        return TextRules.read(self._checkpoint)

    def tokens(self, texts: Prompt | Sequence[Prompt], prompt_name: str | None = None) -> list[list[int]]:
        """Return the token ids of texts to embed. Token ids that are given stay as they are.

        Args:
            texts: a text or its token ids, or a list of these.
            prompt_name: the prompt that precedes each text, by its name; None for the checkpoint's default.

        Raises:
            BatchError: these are no texts.
            ConfigError: there is no prompt of that name.
            CheckpointError: a file is damaged, asks for something that hal does not do, or there is no tokenizer.
        """
        rules = self._rules
        name = rules.default_prompt if prompt_name is None else prompt_name
        if name is not None and name not in rules.prompts:
            raise ConfigError(f"the checkpoint has no prompt {name!r:.60}", nearest(name, rules.prompts))
        prompt = "" if name is None else rules.prompts[name]
        if prompt and not self.pooling.include_prompt:
            raise CheckpointError(
                f"the pooling of {self._checkpoint.path} leaves out the prompt {name!r:.60}, which hal does not do",
                'give the name of an empty prompt, such as "document", or token ids',
            )
        return [
            rules.encode(prompt + each, self._tokenizer())
            if isinstance(each, str)
            else encoded_prompts([each], self._tokenizer)[0]
            for each in listed_prompts(texts)
        ]
