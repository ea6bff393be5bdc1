"""Prompts as callers give them: texts, or token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from hal.errors import BatchError

Prompt = str | Sequence[int]
"""A prompt: text, or token ids."""


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Return prompts as a list: a text, and a list of integers, is one.

    Raises:
        BatchError: they are neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or not all(isinstance(each, str | int | Sequence) for each in prompts):
        raise BatchError(f"prompts is {prompts!r:.70}", "give a text or its token ids, or a list of these")
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)


def encoded_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Callable[[], Tokenizer]) -> list[list[int]]:
    """Return the token ids of prompts. The tokenizer is read if one is text."""
    return [tokenizer().encode(each).ids if isinstance(each, str) else list(each) for each in listed_prompts(prompts)]


def joined(prompt: Prompt, continuation: Prompt, tokenizer: Callable[[], Tokenizer]) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt, and of its continuation.

    Texts are encoded together. If the tokens of the whole do not begin with those of the prompt, each is encoded alone.
    """
    (first,) = encoded_prompts([prompt], tokenizer)
    if not isinstance(continuation, str):
        return first, list(continuation)
    if isinstance(prompt, str):
        whole = tokenizer().encode(prompt + continuation).ids
        if whole[: len(first)] == first and len(whole) > len(first):
            return first, whole[len(first) :]
    return first, tokenizer().encode(continuation, add_special_tokens=False).ids
