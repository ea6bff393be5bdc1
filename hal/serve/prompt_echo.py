"""The prompt that a completion begins with, if a request asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import attrs
from tokenizers import Tokenizer

from hal.generation.generated_text import TextStream
from hal.generation.llm.language_model import LLM
from hal.generation.llm.prompts import listed_prompts
from hal.generation.logprobs import Logprob
from hal.generation.streaming_text import Piece


@attrs.frozen
class PromptEcho:
    """Prompts as pieces.

    Attributes:
        llm: the model.
        given: the prompts as the request has them: texts or token ids.
        prompts: their token ids.
        n: the number of texts of each prompt.
        top: how many of the most likely tokens each piece has; None for no log-probabilities.
        alone: whether nothing follows the prompt.
    """

    llm: LLM
    given: Any
    prompts: Sequence[Sequence[int]]
    n: int
    top: int | None
    alone: bool

    async def pieces(self) -> list[list[Piece]]:
        """Return the pieces of each prompt, a piece for each token, for each of its texts.

        Raises:
            HalError: as :meth:`hal.LLM.aprompt_logprobs`.
        """
        if self.top is None and not self.alone:
            scores: list[list[Logprob]] = [[(None, ())] * (len(each) - 1) for each in self.prompts]
        else:  # They check the prompts, too, if nothing else does.
            scores = await self.llm.aprompt_logprobs(self.prompts, self.top or 0)
        found = []
        for index, (given, tokens, score) in enumerate(
            zip(listed_prompts(self.given), self.prompts, scores, strict=True)
        ):
            texts = _texts(self.llm.tokenizer, given, tokens)
            rows = list(zip(texts, tokens, [(None, ()), *score], strict=True))
            for sample in range(self.n):
                pieces = [Piece(index, text, token, None, sample, *logprob) for text, token, logprob in rows]
                if self.alone:
                    pieces[-1] = attrs.evolve(pieces[-1], finished="length")
                found.append(pieces)
        return found


def _texts(tokenizer: Tokenizer, given: str | Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Return the text of each token of a prompt. Together they are the text that was given."""
    if isinstance(given, str):
        starts = [start for start, _ in tokenizer.encode(given).offsets]
        return [given[start:end] for start, end in pairwise([0, *accumulate(starts[1:], max), len(given)])]
    stream = TextStream(tokenizer)
    texts = [stream.push(each) for each in tokens]
    return [*texts[:-1], texts[-1] + stream.flush()]
