"""Prompts as callers give them: texts, or token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tokenizers import Tokenizer

from hal.errors import BatchError
from hal.nn import EncoderItem


@attrs.frozen(eq=False)
class MultimodalPrompt:
    """A prompt with images or other inputs.

    Attributes:
        token_ids: the tokens, with a placeholder for each embedding.
        items: the inputs, in the order of their placeholders.
    """

    token_ids: Sequence[int]
    items: Sequence[EncoderItem] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


Prompt = str | Sequence[int] | MultimodalPrompt
"""A prompt: text, token ids, or either with images."""


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Return prompts as a list: a text, and a list of integers, is one.

    Raises:
        BatchError: they are neither.
    """
    if isinstance(prompts, str | MultimodalPrompt):
        return [prompts]
    kinds = (str, int, Sequence, MultimodalPrompt)
    if not isinstance(prompts, Sequence) or not all(isinstance(each, kinds) for each in prompts):
        raise BatchError(f"prompts is {prompts!r:.70}", "give a text or its token ids, or a list of these")
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)


def encoded_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Callable[[], Tokenizer]) -> list[list[int]]:
    """Return the token ids of prompts. The tokenizer is read if one is text.

    Raises:
        BatchError: a prompt has images.
    """
    found = read_prompts(prompts, tokenizer)
    if any(each.items for each in found):
        raise BatchError("a text to score or embed has images", "give text alone")
    return [list(each.token_ids) for each in found]


def read_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Callable[[], Tokenizer]) -> list[MultimodalPrompt]:
    """Return prompts as token ids and inputs. The tokenizer is read if one is text."""

    def read(each: Any) -> MultimodalPrompt:
        if isinstance(each, MultimodalPrompt):
            return each
        return MultimodalPrompt(tokenizer().encode(each).ids if isinstance(each, str) else list(each))

    return [read(each) for each in listed_prompts(prompts)]


def paired(
    prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt], tokenizer: Callable[[], Tokenizer]
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each prompt, of which one may be for all, and of its continuation.

    Raises:
        BatchError: there are not as many prompts, or one is empty.
    """
    before, after = listed_prompts(prompts), listed_prompts(continuations)
    if len(before) == 1:
        before = before * len(after)
    if len(before) != len(after):
        raise BatchError(f"got {len(before)} prompts and {len(after)} continuations", "give one for each")
    pairs = [_joined(*pair, tokenizer) for pair in zip(before, after, strict=True)]
    for index, pair in enumerate(pairs):
        if not all(pair):
            raise BatchError(f"prompt or continuation {index} is empty", "give each at least one token")
    return pairs


def _joined(prompt: Prompt, continuation: Prompt, tokenizer: Callable[[], Tokenizer]) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt, and of its continuation.

    Texts are encoded together. If the tokens of the whole do not begin with those of the prompt, each is encoded alone.
    """
    (first,) = encoded_prompts([prompt], tokenizer)
    if not isinstance(continuation, str):
        return first, encoded_prompts([continuation], tokenizer)[0]
    if isinstance(prompt, str):
        whole = tokenizer().encode(prompt + continuation).ids
        if whole[: len(first)] == first and len(whole) > len(first):
            return first, whole[len(first) :]
    return first, tokenizer().encode(continuation, add_special_tokens=False).ids
