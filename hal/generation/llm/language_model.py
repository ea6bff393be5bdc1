"""hal.LLM: a model by name, and texts from it."""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import Progress
from hal.checkpoint.weight_release import Kept
from hal.drivers.registry import merged_config, read_config
from hal.errors import ConfigError
from hal.execution.prefix_transfer import CachedPrefix, export_prefix, import_prefix
from hal.execution.replace_weights import NewWeights
from hal.execution.runner import Runner
from hal.execution.sleep_state import Part, Slept
from hal.generation.drafting.draft_length import Acceptance
from hal.generation.drafting.drafter import DraftConfig
from hal.generation.generate import Piece
from hal.generation.generated_text import GeneratedText
from hal.generation.llm.checkpoint_defaults import merged, recommended, with_stops
from hal.generation.llm.completion import Completion, Score, completion_of, token_logprobs
from hal.generation.llm.embedder import Embedder
from hal.generation.llm.engine import Engine, open_engine
from hal.generation.llm.given_choices import fields_of_choices
from hal.generation.llm.loop_pass import Change
from hal.generation.llm.messages import Message
from hal.generation.llm.model_weights import change_adapter, pairs_of, replace, sleep_all, wake_all
from hal.generation.llm.piece_stream import PieceStream, iterate_pieces, iterate_texts, iterate_texts_asynchronously
from hal.generation.llm.processor import Conversations
from hal.generation.llm.prompt_pass import PoolingPass, ScorePass
from hal.generation.llm.prompts import MultimodalPrompt, Prompt, encoded_prompts, paired, read_prompts
from hal.generation.llm.serving_loop import Occupancy, ServingLoop
from hal.generation.logits_processing import Logprob
from hal.generation.request import Request, checked
from hal.generation.sampling_params import SamplingParams

_SAMPLING = frozenset(each.name for each in attrs.fields(SamplingParams))


class LLM:
    """A language model that continues texts.

    It opens a backend, loads the model and makes a runner, and a thread runs the requests of all callers together:
    later ones join those that run. A context manager; :meth:`close` frees everything.

    Sampling parameters are the attributes of :class:`hal.SamplingParams`, by name. For those that are not given, the
    checkpoint's generation_config.json counts. Without a seed, each call draws one. Prompt ``i`` uses the seed plus
    ``i``; with ``n`` texts a prompt, plus ``n * i``. The checkpoint's stop tokens end a text unless ``ignore_eos`` is
    given.

    Finished prompts stay in the cache while there is room, and later ones skip the prefix that they share with one,
    unless ``cache.reuse_prefixes`` is false.

    Ranks that torchrun or hal started share a model if ``parallel.tensor`` says so: each makes an LLM, the first rank
    calls it, and the others run the same steps until that one closes its own. Their :meth:`close` waits for it.

    Threading: any thread may call the methods.

    Args:
        model: the checkpoint's folder, a name of the Hugging Face Hub such as ``Qwen/Qwen3-0.6B``, or an opened
            checkpoint.
        backend: a driver's name, or ``auto``: that of the configuration, or else the available driver of highest
            priority.
        dtype: the dtype of weights and cache: ``float32``, ``bfloat16``, ``float16`` or ``auto``, the checkpoint's.
        compiler: how steps run, such as ``eager`` or ``graph``.
        model_source: where the model's code comes from, as in the configuration.
        revision: the branch, tag or commit of a model of the hub.
        max_length: the most tokens of a prompt and its text; None for what the model takes and the cache holds.
        max_sequences: the most texts that are generated together. Others wait.
        draft: drafts tokens, which the model verifies some at a time: ``ngram``, ``mtp``, the folder or name of a
            smaller checkpoint, or keys of :class:`~hal.generation.drafting.drafter.DraftConfig`. The texts are the
            same.
        adapters: folders of adapters (LoRA) that PEFT saved, by the name with which requests choose one. Unless the
            configuration says ``adapters.slots``, there is room for one more, of the largest rank.
        record: what its layers choose that completions have: ``experts``, ``positions`` or both; see
            :func:`hal.nn.keep_choices`. It takes a copy to the host in each step.
        replay: what :meth:`log_probabilities` can be given of it. It takes launches in each step.
        config: further keys of the configuration; see :func:`hal.open`. The ``HAL_*`` environment variables set the
            keys that are not given.
        progress: called as weights are loaded.

    Attributes:
        checkpoint: the checkpoint.
        first: whether this is the rank that takes the requests.
        defaults: the sampling parameters that it recommends.
        embedder: encodes the texts to embed.
        max_length: the most tokens of a prompt and its text.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or unsafe, or cannot be downloaded.
        ConfigError: the configuration is invalid, or the cache does not fit the memory.
        DriverError: the driver is missing or cannot run here.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        backend: str = "auto",
        dtype: str | None = None,
        compiler: str | None = None,
        model_source: str | None = None,
        revision: str | None = None,
        max_length: int | None = None,
        max_sequences: int = 64,
        draft: str | Mapping[str, Any] | DraftConfig | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        record: Collection[str] = (),
        replay: Collection[str] = (),
        config: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        if isinstance(model, Checkpoint) and revision is not None:
            raise ConfigError(f"revision is {revision!r}, and the checkpoint is open", "pass it to hal.Checkpoint.open")
        self.checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model, revision=revision)
        self.defaults: Mapping[str, Any] = recommended(self.checkpoint)
        self._stop_token_ids = self.checkpoint.stop_token_ids
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self.embedder = Embedder(self.checkpoint, lambda: self.tokenizer)
        self._conversations = Conversations(self.checkpoint, lambda: self.tokenizer, lambda: self._runner.model)
        given = {} if config is None else read_config(config)
        named = {"backend": backend, "dtype": dtype, "model_source": model_source}
        given |= {name: value for name, value in named.items() if value not in (None, "auto")}
        if compiler is not None:
            given["compilation"] = {**given.get("compilation", {}), "compiler": compiler}
        with ExitStack() as stack:
            engine = open_engine(
                self.checkpoint,
                merged_config(given),
                stack,
                max_length=max_length,
                max_sequences=max_sequences,
                progress=progress,
                draft=None if draft is None else DraftConfig.of(draft),
                adapters=adapters or {},
                record=record,
                replay=replay,
            )
            self._runner, self.max_length, self._speculation = engine.runner, engine.max_length, engine.speculation
            self.first = self._runner.backend.mesh.first
            self._loop = ServingLoop(engine, max_sequences, self.checkpoint.tokenizer)
            stack.callback(self._loop.close)
            # Closes at the end of the program, too.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, and close runner and backend. Requests of other threads get a ClosedError.

        Raises:
            HalError: another rank failed, or this one did.
        """
        self._finalizer()

    @property
    def ended(self) -> bool:
        """Whether it takes no further requests, because it is closed, or a rank failed."""
        return self._loop.ended

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            CheckpointError: it has none.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self.checkpoint.tokenizer()
            return self._tokenizer

    @property
    def occupancy(self) -> Occupancy:
        """How many texts run and wait, and what they hold of the cache."""
        return self._loop.occupancy

    @property
    def acceptance(self) -> Acceptance | None:
        """How many drafted tokens the model agreed with so far; None without a drafter."""
        return None if self._speculation is None else self._speculation.acceptance

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests can choose."""
        found = self._runner.model.adapters
        return [] if found is None else found.names

    @property
    def recorded(self) -> tuple[str, ...]:
        """The names of what the model records with each text."""
        kept = self._runner.model.choices
        return () if kept is None else kept.record

    @property
    def replayed(self) -> tuple[str, ...]:
        """The names of what :meth:`log_probabilities` can be given of the model's choices."""
        kept = self._runner.model.choices
        return () if kept is None else kept.replay

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load an adapter (LoRA) that PEFT saved, or load it anew in the place of the one of this name.

        Requests that run keep the former one.

        Raises:
            CheckpointError: the files are missing or damaged, do not fit the model, or ask for what hal does not
                compute.
            ConfigError: its rank is above ``adapters.rank``, no slot is free, or the model has no room for adapters.
            AsleepError: the LLM sleeps.
            ClosedError: the LLM is closed.
        """
        self._change(functools.partial(change_adapter, name=name, folder=str(folder)), alone=False)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. Requests that run with it go on.

        Raises:
            ConfigError: there is none of this name.
            ClosedError: the LLM is closed.
        """
        self._change(functools.partial(change_adapter, name=name, folder=None), alone=False)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Continue one prompt or several, and return the texts in their order, ``n`` for each.

        Args:
            prompts: a text or its token ids, or a list of these.
            params: the sampling parameters, as they are; instead of ``sampling``.
            adapter: the name of the adapter to continue them with; None for the model alone.
            sampling: sampling parameters by name.

        Raises:
            BatchError: a prompt is empty or too long, or has a token id out of range.
            ConfigError: a parameter is unknown or out of range, or there is no such adapter.
            CheckpointError: a prompt is text, and the checkpoint has no tokenizer.
            NumericsError: the logits have a NaN.
            AsleepError: the model sleeps.
            ClosedError: the LLM is closed.
        """
        return self._complete(self._encoded(prompts), params, adapter, sampling)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        **given: Any,
    ) -> list[Completion]:
        """Answer one conversation or several, and return the answers in their order.

        Args:
            messages: the messages of a conversation, each with ``role`` and ``content``, or a list of conversations.
                A content may be a list of parts: ``{"type": "text", "text": ...}``, and for a model that reads images
                ``{"type": "image", "image": ...}``, where the image is a path, bytes, a data URL or an image of PIL; or
                ``{"type": "video", "video": ..., "fps": ...}``, a file or a list of frames.
            tools: the JSON schemas of functions that the model may call.
            params: the sampling parameters, as they are.
            adapter: as of :meth:`generate`.
            given: sampling parameters by name. Every other name is a switch of the template, such as
                ``enable_thinking``.

        Raises:
            ConfigError: the template refuses the messages, or has no such switch; or a library for media is missing.
            CheckpointError: the checkpoint has no template, or the template fails.
            BatchError: an image or a video cannot be read, or is too large.
            ModelError: there are images or videos, and the model does not read them.
            HalError: as :meth:`generate`.
        """
        conversations: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        switches = {name: given.pop(name) for name in given.keys() - _SAMPLING}
        prompts = [self.chat_prompt(each, tools=tools, **switches) for each in conversations]
        return self._complete(self._encoded(prompts), params, adapter, given)

    def chat_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **switches: Any
    ) -> list[int] | MultimodalPrompt:
        """Return the prompt of a conversation, as the checkpoint's template writes it, for :meth:`stream`.

        The arguments and errors are those of :meth:`chat`.
        """
        return self._conversations.prompt(messages, tools, switches)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None, **sampling: Any
    ) -> Iterator[str]:
        """Continue a prompt, and yield its text in pieces, which never split a character.

        Closing the iterator cancels the request. The arguments and errors are those of :meth:`generate`.
        """
        return iterate_texts(self.pieces(prompt, params, adapter=adapter, **sampling))

    def pieces(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None, **sampling: Any
    ) -> Iterator[Piece]:
        """Continue a prompt as :meth:`stream` does, and yield a piece for each token. The last has the reason."""
        request = self._single(prompt, params, adapter, sampling)
        return iterate_pieces(self._loop, request, GeneratedText(self.tokenizer, request.tokens, request.params))

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None, **sampling: Any
    ) -> AsyncIterator[str]:
        """Continue a prompt as :meth:`stream` does, without blocking the event loop."""
        single = self._single(prompt, params, adapter, sampling)
        return iterate_texts_asynchronously(self._piece_stream([single]))

    def apieces(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **sampling: Any,
    ) -> PieceStream:
        """Continue one prompt or several, ``n`` texts for each, without blocking the event loop.

        An asynchronous iterator of pieces, one for each token, as they arrive. The arguments and errors are those of
        :meth:`generate`; there are no log-probabilities of the prompt.
        """
        requests = self._requests(self._encoded(prompts), params, adapter, sampling)
        if any(each.params.prompt_logprobs is not None for each in requests):
            raise ConfigError("prompt_logprobs is set, and pieces are of the new text only", "use generate()")
        return self._piece_stream(requests)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        adapter: str | None = None,
        choices: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> list[Score]:
        """Return how likely the model finds each continuation of a prompt.

        Two texts are encoded together. If the tokens of the whole do not begin with those of the prompt, each is
        encoded alone.

        Args:
            prompts: one for each continuation, or one for all.
            continuations: the continuations.
            adapter: as of :meth:`generate`.
            choices: what the model's layers choose for the tokens of each prompt and its continuation, as
                :class:`hal.Completion` has it, with the same names for each; None for what they choose themselves. So
                do the tokens beyond the given ones.

        Raises:
            BatchError: there are not as many prompts, one is empty, a sequence is too long, or the choices are out of
                range or of another model.
            ConfigError: there are choices that the model does not replay.
            CheckpointError: one is text, and the checkpoint has no tokenizer.
            ClosedError: the LLM is closed.
        """
        pairs = paired(prompts, continuations, lambda: self.tokenizer)
        whole = [[*prompt, *continuation] for prompt, continuation in pairs]
        self._check(whole)
        starts = [len(prompt) for prompt, _ in pairs]
        scores = self._scoring(whole, starts, adapter=adapter, choices=choices).result().scores
        return [Score(token_logprobs(pair[1], each)) for pair, each in zip(pairs, scores, strict=True)]

    def log_probabilities(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        adapter: str | None = None,
        choices: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> list[Tensor]:
        """Return the log-probabilities of the tokens of each continuation, ``[tokens]``, float32, on the CPU.

        They are the log-softmax of the model's logits, at temperature 1. The arguments and errors are those of
        :meth:`score`.
        """
        scores = self.score(prompts, continuations, adapter=adapter, choices=choices)
        return [torch.tensor([each.logprob for each in found.tokens]) for found in scores]

    def export_prefix(self, prompt: Prompt) -> bytes:
        """Return the cached states of the longest prefix of a prompt, in whole blocks, to continue it elsewhere.

        A prompt is cached once texts were generated from it. Adapters and images have prefixes of their own, which are
        not found. A prefix takes the bytes of its tokens in the cache.

        Raises:
            ConfigError: as :func:`hal.execution.prefix_transfer.export_prefix`.
        """
        (encoded,) = self._encoded(prompt)
        found: CachedPrefix = self._change(functools.partial(_on_runner, export_prefix, list(encoded.token_ids)))
        return found.to_bytes()

    def import_prefix(self, data: bytes) -> int:
        """Keep a prefix that :meth:`export_prefix` returned, perhaps of another backend, with the same checkpoint.

        Returns:
            The tokens that prompts which begin with them need not compute.

        Raises:
            ConfigError: as :meth:`hal.execution.prefix_transfer.CachedPrefix.from_bytes` and
                :func:`hal.execution.prefix_transfer.import_prefix`.
        """
        found: int = self._change(functools.partial(_on_runner, import_prefix, CachedPrefix.from_bytes(data)))
        return found

    def replace_weights(self, tensors: NewWeights, *, drafter: bool = False) -> None:
        """Write new values into the weights, as :func:`hal.replace_weights`, and drop all cached prefixes.

        Running texts end with the former weights. Those that come later wait. If ranks share the model, the first rank
        passes whole tensors to the others, and each opens the checkpoint of a path.

        Args:
            tensors: tensors by name, or pairs of them, such as what :func:`hal.parallel.receive_weights` yields; or a
                checkpoint, or its path.
            drafter: whether they are those of the drafter. It shares the model's embedding where it has the same.

        Raises:
            CheckpointError: a tensor does not fit, or the checkpoint is damaged. A mapping changes nothing then.
            ConfigError: there is no drafter with weights.
            ClosedError: the LLM is closed.
        """
        if self._runner.backend.mesh.size > 1 and not isinstance(tensors, str | Path):
            tensors = {name: each.detach().cpu() for name, each in pairs_of(tensors)}
        self._change(functools.partial(replace, tensors=tensors, drafter=drafter))

    def sleep(self, *, weights: Kept = "host", caches: bool = True) -> Slept:
        """Give back the memory of weights and caches, those of the drafter too, until :meth:`wake`; see
        :func:`hal.sleep`.

        Running texts end first. Later ones get an AsleepError.

        Args:
            weights: what is kept of them: ``device``, ``host``, ``files`` or ``none``.
            caches: whether the caches sleep.

        Returns:
            What was given back, and whether addresses are kept, so that graphs stay.

        Raises:
            AsleepError: it sleeps already.
            ConfigError: ``weights`` is none of these, or is ``files``, and others than a whole checkpoint's replaced
                them.
            ClosedError: the LLM is closed.
        """
        found: Slept = self._change(functools.partial(sleep_all, weights=weights, caches=caches))
        return found

    def wake(self, part: Part | None = None) -> None:
        """Take memory again for what sleeps; see :func:`hal.wake`.

        Args:
            part: ``weights`` or ``caches``; None for all that sleeps.

        Raises:
            HalError: the device has too little memory, the checkpoint cannot be read, or a graph cannot be captured.
            ClosedError: the LLM is closed.
        """
        self._change(functools.partial(wake_all, part=part))

    async def aprompt_logprobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        top: int = 0,
        *,
        adapter: str | None = None,
        choices: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> list[list[Logprob]]:
        """Return the log-probabilities of prompts' second and later tokens, and of ``top`` likely ones, as score()."""
        encoded = await asyncio.to_thread(encoded_prompts, prompts, lambda: self.tokenizer)
        self._check(encoded)
        scoring = self._scoring(encoded, [1] * len(encoded), top, adapter, choices)
        return (await asyncio.wrap_future(scoring)).scores

    def embed(self, texts: Prompt | Sequence[Prompt], *, prompt_name: str | None = None) -> Tensor:
        """Return the embeddings of texts, ``[texts, width]``, float32, on the CPU.

        Prompts, the length at which texts are cut, pooling and layers are those of the files of sentence-transformers.
        Without its modules.json, an embedding is the last token's hidden state.

        Args:
            texts: a text or its token ids, or a list of these. Token ids are embedded as they are.
            prompt_name: the checkpoint's prompt that precedes each text, such as ``query``; None for its default.

        Raises:
            BatchError: a text is empty or too long.
            ConfigError: the checkpoint has no such prompt.
            CheckpointError: it has no tokenizer, or declares something that hal does not do.
            ClosedError: the LLM is closed.
        """
        return self._embeddings(self._pooling(texts, prompt_name).result())

    async def aembed(self, texts: Prompt | Sequence[Prompt], *, prompt_name: str | None = None) -> Tensor:
        """Return the embeddings of texts as :meth:`embed` does, without blocking the event loop."""
        pooling = await asyncio.to_thread(self._pooling, texts, prompt_name)
        return self._embeddings(await asyncio.wrap_future(pooling))

    def _pooling(self, texts: Prompt | Sequence[Prompt], prompt_name: str | None) -> Future[PoolingPass]:
        self._check(prompts := self.embedder.tokens(texts, prompt_name))
        return self._loop.start(functools.partial(PoolingPass, prompts=prompts, mode=self.embedder.pooling.mode))

    def _embeddings(self, done: PoolingPass) -> Tensor:
        return self.embedder.pooling.apply(torch.stack(done.vectors)) if done.vectors else torch.empty(0)

    def _change(self, make: Callable[[Engine], Any], *, alone: bool = True) -> Any:
        done = self._loop.start(functools.partial(Change, make=make, alone=alone)).result()
        if done.error is not None:
            raise done.error
        return done.result

    def _scoring(
        self,
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int],
        top: int = 0,
        adapter: str | None = None,
        choices: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> Future[ScorePass]:
        given = None if choices is None else fields_of_choices(self._runner.model, choices, list(map(len, prompts)))
        made = functools.partial(ScorePass, prompts=prompts, starts=starts, top=top, adapter=adapter, given=given)
        return self._loop.start(made)

    def _encoded(self, prompts: Prompt | Sequence[Prompt]) -> list[MultimodalPrompt]:
        return read_prompts(prompts, lambda: self.tokenizer)

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Check prompts that generate nothing."""
        once = SamplingParams(max_new_tokens=1)
        for index, each in enumerate(prompts):
            checked(self._runner, index, each, once, max_length=self.max_length + 1)

    def _params(self, params: SamplingParams | None, sampling: Mapping[str, Any], count: int) -> list[SamplingParams]:
        """Return the parameters of ``count`` prompts."""
        if params is None:
            first = merged(self.defaults, self._stop_token_ids, sampling, seed=secrets.randbelow(1 << 32))
            return [attrs.evolve(first, seed=(first.seed + index * first.n) % (1 << 63)) for index in range(count)]
        if sampling or not isinstance(params, SamplingParams):
            raise ConfigError(
                f"params is {params!r:.70}, with {', '.join(sampling) or 'no names'}",
                "give hal.SamplingParams(...), or sampling parameters by name, such as temperature=0.7",
            )
        return [with_stops(params, self._stop_token_ids)] * count

    def _request(self, index: int, prompt: MultimodalPrompt, params: SamplingParams, adapter: str | None) -> Request:
        more: dict[str, Any] = {"tokenizer": self.tokenizer} if params.in_text else {}
        more |= {"max_length": self.max_length, "items": prompt.items, "adapter": adapter}
        return checked(self._runner, index, prompt.token_ids, params, **more)

    def _single(
        self, prompt: Prompt, params: SamplingParams | None, adapter: str | None, sampling: Mapping[str, Any]
    ) -> Request:
        (wanted,) = self._params(params, sampling, 1)
        if wanted.n != 1 or wanted.prompt_logprobs is not None:
            raise ConfigError("n or prompt_logprobs is set, and a stream has text only", "use generate()")
        (single,) = self._encoded([prompt])
        return self._request(0, single, wanted, adapter)

    def _piece_stream(self, requests: Sequence[Request]) -> PieceStream:
        texts = {each: GeneratedText(self.tokenizer, each.tokens, each.params) for each in requests}
        return PieceStream(self._loop, texts)

    def _requests(
        self,
        prompts: Sequence[MultimodalPrompt],
        params: SamplingParams | None,
        adapter: str | None,
        sampling: Mapping[str, Any],
    ) -> list[Request]:
        found: list[Request] = []
        for index, (prompt, wanted) in enumerate(
            zip(prompts, self._params(params, sampling, len(prompts)), strict=True)
        ):
            leader: Request | None = None
            for sample in range(wanted.n):
                seeded = attrs.evolve(wanted, seed=(wanted.seed + sample) % (1 << 63))
                request = self._request(index, prompt, seeded, adapter)
                request.sample_index, request.leader = sample, leader
                leader = leader or request
                found.append(request)
        return found

    def _complete(
        self,
        prompts: Sequence[MultimodalPrompt],
        params: SamplingParams | None,
        adapter: str | None,
        sampling: Mapping[str, Any],
    ) -> list[Completion]:
        requests = self._requests(prompts, params, adapter, sampling)
        if not requests:
            return []
        before = self._prompt_logprobs(requests)
        found = self._loop.tokens_of(requests)
        tokenizer = self.tokenizer if self.checkpoint.has_tokenizer else None
        return [
            completion_of(request, found[request], before.get(request.prompt_index), tokenizer) for request in requests
        ]

    def _prompt_logprobs(self, requests: Sequence[Request]) -> dict[int, list[Logprob]]:
        first = {each.prompt_index: each for each in requests if each.params.prompt_logprobs is not None}
        if not first:
            return {}
        prompts = [each.tokens[: each.length] for each in first.values()]
        top = next(iter(first.values())).params.prompt_logprobs
        scores = self._scoring(prompts, [1] * len(prompts), top or 0, requests[0].adapter).result().scores
        return dict(zip(first, scores, strict=True))


def _on_runner(do: Callable[[Runner, Any], Any], given: Any, engine: Engine) -> Any:
    return do(engine.runner, given)
