"""How texts become embeddings: prompts, tokens and pooling, as the files of sentence-transformers say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
from tokenizers import Tokenizer

from hal.checkpoint.checkpoint import Checkpoint
from hal.config.untrusted_files import is_there
from hal.errors import CheckpointError, ConfigError, nearest
from hal.generation.llm.pooling import FILE as MODULES
from hal.generation.llm.pooling import Pooling
from hal.generation.llm.prompts import Prompt, encoded_prompts, listed_prompts

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
    """Reads what a checkpoint says of embeddings, when it is first needed. Threading: any thread may call it.

    Args:
        checkpoint: the checkpoint.
        tokenizer: returns its tokenizer.
    """

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
