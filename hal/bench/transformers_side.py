"""Hugging Face transformers as a contender: its eager forward, and compiled with a static cache.

It runs as in ``generate``, without the parts that hal's figures also omit: sampling, and creating a step's inputs from
tokens (``prepare_inputs_for_generation`` there, ``Runner.batch`` in hal).
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal.bench.plan import BenchmarkError, Setting
from hal.bench.workload import Contender, Inputs
from hal.checkpoint.tensor_names import named_by_model, renamed
from hal.checkpoint.weight_bindings import bindings_of, sources_of
from hal.config.optional_libraries import need

ADJACENT = "deepseek_v2"
"""The model type whose cached rotary rows keep the elements of a pair adjacent; others cache them in halves."""
GROUP = "torch.backends"
"""Entry-point group in which ``import torch`` looks up device extensions."""


class TransformersSide:
    """transformers' model for the same config, with the same weights.

    Raises:
        ConfigError: transformers is not installed.
        BenchmarkError: it does not support the model.
    """

    def __init__(self, setting: Setting) -> None:
        self._device = setting.backend.device
        # generate() compiles only decode steps.
        self.modes = ("eager", "compiled") if setting.plan.workload == "decode" else ("eager",)
        with only_imported_extensions():
            self._library = need("transformers", "bench", "--against transformers")
            with (
                torch.device(self._device.torch),
                need("transformers.initialization", "bench", "--against transformers").no_init_weights(),
            ):
                self._model = model_of(self._library, setting.checkpoint.config, setting.dtype).eval()
        self._model.tie_weights()  # no_init_weights() skips it
        self._fill_parameters(setting)

    def _fill_parameters(self, setting: Setting) -> None:
        """Copy the checkpoint's weights. transformers stacks experts under the path of hal's layer."""
        stacked = {each.path: each.pieces() for each in bindings_of(setting.meta)}
        checkpoint = named_by_model(setting.checkpoint, setting.meta)
        known = sources_of(setting.meta) | stacked.keys()
        parameters = renamed(dict(self._model.named_parameters()), setting.meta, known)
        absent = sorted(set(parameters) - set(checkpoint.tensors))
        if unknown := [name for name in absent if name not in stacked]:
            raise BenchmarkError(
                f"transformers' model has parameters that are not in the checkpoint: {', '.join(unknown[:3])}",
                "omit --against, or check that config.json matches the weights",
            )
        for name, values in checkpoint.read(set(parameters) - set(absent)):
            parameters[name].data.copy_(values)
        for name in absent:
            for piece, (_, values) in zip(
                stacked[name], checkpoint.read([each.source for each in stacked[name]]), strict=True
            ):
                piece.put(parameters[name].data, 0, values)

    def contender(self, mode: str, inputs: Inputs) -> Contender:
        """Create a contender with its cache."""
        tokens = inputs.tokens.to(self._device.torch)
        if inputs.workload == "prefill":
            forward, reset = self._prefill(tokens)
        elif mode == "eager":
            forward, reset = self._eager(tokens, inputs)
        else:
            forward, reset = self._compiled(tokens, inputs)

        def step() -> Tensor:
            with torch.no_grad():  # as generate() does
                logits: Tensor = forward().logits[:, -1]
            return logits

        start = time.perf_counter()
        step()
        self._device.synchronize()
        return Contender(f"transformers {mode}", step, reset, time.perf_counter() - start)

    def _prefill(self, tokens: Tensor) -> tuple[Callable[[], Any], Callable[[], None]]:
        held = [self._library.DynamicCache(config=self._model.config)]

        def reset() -> None:
            held[0] = self._library.DynamicCache(config=self._model.config)

        return lambda: self._model(input_ids=tokens, cache=held[0], use_cache=True, logits_to_keep=1), reset

    def _eager(self, tokens: Tensor, inputs: Inputs) -> tuple[Callable[[], Any], Callable[[], None]]:
        cache = self._library.DynamicCache(config=self._model.config)
        self._fill(cache, inputs)
        restore = _restoring(cache)

        def reset() -> None:
            longer = cache.get_seq_length() - inputs.length
            if longer:
                for layer, recurrent in zip(cache.layers, cache.is_linear, strict=True):
                    if not recurrent:
                        layer.crop(-longer)
            restore()

        return lambda: self._model(input_ids=tokens, cache=cache, use_cache=True), reset

    def _compiled(self, tokens: Tensor, inputs: Inputs) -> tuple[Callable[[], Any], Callable[[], None]]:
        # The smallest static cache for the step. generate() allocates and attends over one for all future tokens, so it
        # is never faster than this.
        cache = self._library.StaticCache(config=self._model.config, max_cache_len=inputs.length + 1)
        self._fill(cache, inputs)
        every = torch.ones(inputs.batch_size, inputs.length + 1, dtype=torch.int64, device=tokens.device)
        positions = torch.full_like(tokens, inputs.length)
        prepared = self._model.prepare_inputs_for_generation(
            tokens, cache=cache, attention_mask=every, position_ids=positions, use_cache=True
        )
        compiled = self._model.get_compiled_call(None)
        restore = _restoring(cache)

        def reset() -> None:
            for layer, recurrent in zip(cache.layers, cache.is_linear, strict=True):
                if not recurrent:
                    layer.cumulative_length.fill_(inputs.length)
                    if hasattr(layer, "update_indexer"):
                        layer.indexer_cumulative_length.fill_(inputs.length)
            restore()

        return lambda: compiled(**prepared, return_dict=True), reset

    def _fill(self, cache: Any, inputs: Inputs) -> None:
        if any(cache.is_sliding):
            raise BenchmarkError(
                "the model has a sliding window, and transformers cannot reset a sliding-window cache after a step",
                "omit --against",
            )
        for layer in range(len(inputs.setting.meta.states)):
            held = inputs.cached(layer)
            if "key" in held:
                keys, values = (held[name].transpose(1, 2).contiguous() for name in ("key", "value"))
                cache.update(keys, values, layer)
            elif "latent" in held:
                rope = held["rope"] if "rope" in held else held["latent"][..., :0]
                if self._model.config.model_type != ADJACENT:
                    rope = rope.unflatten(-1, (-1, 2)).mT.flatten(-2)
                cache.update(held["latent"].unsqueeze(1), rope.unsqueeze(1), layer)
                if "index" in held:
                    cache.update_indexer(held["index"], layer)
            else:
                # transformers' window has a column more, of a token that the convolution does not see again.
                cache.update_conv_state(functional.pad(held["window"].mT, (1, 0)), layer)
                cache.update_recurrent_state(held["matrix"].mT, layer)


def _restoring(cache: Any) -> Callable[[], None]:
    """Return a function that restores the states of recurrent layers, which every step changes."""
    layers = [layer for layer, recurrent in zip(cache.layers, cache.is_linear, strict=True) if recurrent]
    states = [
        state for layer in layers for each in (layer.conv_states, layer.recurrent_states) for state in each.values()
    ]
    saved = [(state, state.clone()) for state in states]

    def restore() -> None:
        for state, values in saved:
            state.copy_(values)

    return restore


def model_of(library: Any, config: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
    """Create transformers' model for a ``config.json`` on torch's default device.

    Raises:
        BenchmarkError: transformers does not support the model.
    """
    keys = dict(config)
    try:
        known = library.AutoConfig.for_model(keys.pop("model_type"), **keys)
        return library.AutoModelForCausalLM.from_config(known, dtype=dtype)
    except (KeyError, ValueError) as error:
        raise BenchmarkError(f"transformers does not support the model: {error!s:.300}", "omit --against") from error


@contextmanager
def only_imported_extensions() -> Iterator[None]:
    """Hide torch extensions that are not imported yet.

    transformers imports every installed device extension, and fails if one cannot be imported, for example for lack of
    the vendor's runtime. hal's driver has already imported the extension that the device needs. transformers caches its
    lookup, so import it and create its models inside the block.

    Python treats a module that is None in ``sys.modules`` as missing. The entries are removed at the end of the block.
    They affect the whole process, so no other thread may open a backend meanwhile.
    """
    packages = {entry.module.partition(".")[0] for entry in importlib.metadata.entry_points(group=GROUP)}
    hidden = packages - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # typeshed knows modules alone
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]
