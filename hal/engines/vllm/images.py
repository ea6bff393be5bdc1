"""Images in vLLM's front end: hal's processors prepare them, so that a request reads what ``hal.LLM`` reads.

vLLM asks a model's class how its inputs are prepared. For models of hal that have an encoder, :func:`register` gives it
a class with hal's processor. vLLM makes no instance of it, since hal's worker loads the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
)

from hal import Checkpoint, architectures
from hal.checkpoint.model_registry import find_model
from hal.checkpoint.random_weights import meta_model
from hal.engines.vllm.request import item_of
from hal.engines.vllm.vllm_config import PREPARED
from hal.errors import BatchError, HalError
from hal.generation.llm.images import read_image
from hal.generation.llm.processor import Preparation, open_processor
from hal.nn import CausalLM
from hal.nn.encoder import IMAGE

_THEIRS: dict[str, Any] = {}
"""vLLM's entries for the architectures that :func:`register` has replaced."""


def register() -> None:
    """Register hal's processor for every model of hal that has an encoder, and that vLLM knows too."""
    for name in architectures():
        theirs = ModelRegistry.models.get(name)
        if theirs is not None and name not in PREPARED and _reads_images(name):
            _THEIRS[name] = theirs
            ModelRegistry.register_model(name, f"{__name__}:{name}")
            PREPARED.add(name)


def _reads_images(architecture: str) -> bool:
    with suppress(HalError):  # A package whose model cannot be imported must not stop the others.
        return find_model(architecture).encoder is not CausalLM.encoder
    return False


def __getattr__(name: str) -> Any:
    """Return vLLM's class of a registered architecture, with hal's processor. vLLM imports it by this name."""
    if name not in _THEIRS:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    try:
        theirs = _THEIRS[name].load_model_cls()  # which knows, for example, whether layers keep states per sequence
    except ImportError:  # Some of vLLM's need torchvision.
        theirs = ReadsImages
    made = type(name, (theirs,), {"supports_mm_device_do_normalize": False, "supports_encoder_tp_data": False})
    MULTIMODAL_REGISTRY.register_processor(ImageProcessor, info=ImageInfo, dummy_inputs=NoDummies)(made)
    globals()[name] = made
    return made


class ReadsImages(nn.Module, SupportsMultiModal):
    """A model with images, as far as vLLM asks before a worker loads it."""

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        raise NotImplementedError("hal's worker loads the model")

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Return None: the chat template writes the placeholders."""
        return None

    def embed_input_ids(self, input_ids: Tensor, *args: Any, **options: Any) -> Tensor:
        """Do not embed. vLLM looks for the method."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Do not run. vLLM looks for the method."""
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Compute no logits. vLLM looks for the method."""
        raise NotImplementedError


class ImageInfo(BaseProcessingInfo):
    """What vLLM asks about the images of a model."""

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint."""
        return Checkpoint.open(Path(self.model_id))

    @cached_property
    def model(self) -> CausalLM:
        """hal's model, without values."""
        return meta_model(self.checkpoint.config)

    @cached_property
    def preparation(self) -> Preparation:
        """What prepares its images."""
        return open_processor(self.checkpoint)

    @cached_property
    def placeholder(self) -> int:
        """The token that stands for an embedding of an image."""
        return next(token for token, kind in self.model.placeholders.items() if kind == IMAGE)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return that prompts have any number of images."""
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return 1, so that vLLM's budgets of embeddings are those of a step's tokens, which hal measures."""
        return {IMAGE: 1}

    def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        """Return that the processor has no arguments."""
        return {}


class NoDummies(BaseDummyInputsBuilder[ImageInfo]):
    """Makes a small image. The worker measures the largest step of the encoder itself."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Return a text with the placeholders."""
        text: str = self.info.get_tokenizer().decode([self.info.placeholder] * mm_counts.get(IMAGE, 0))
        return text

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        """Return the images."""
        return {IMAGE: self._get_dummy_images(width=64, height=64, num_images=mm_counts.get(IMAGE, 0))}


class ImageProcessor(BaseMultiModalProcessor[ImageInfo]):
    """Prepares images as ``hal.LLM`` does, and repeats their placeholders."""

    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> dict[str, Tensor]:
        if hf_kwargs:
            raise ValueError(f"hal does not read mm_processor_kwargs: {', '.join(hf_kwargs)!s:.70}")
        try:
            images = [read_image(each, f"image {index}") for index, each in enumerate(hf_data["images"])]
            items = self.info.preparation.items(images)
        except BatchError as error:
            raise ValueError(str(error)) from error  # which vLLM answers with the status 400
        return {
            "values": torch.cat([each.values for each in items]),
            "grid": torch.tensor([each.grid for each in items]),
        }

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Tensor], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        if not hf_inputs:
            return {}
        # vLLM would drop other fields for images in a cached prefix, which hal may need when a request is resumed.
        return {
            "values": MultiModalFieldConfig.flat_from_sizes(IMAGE, hf_inputs["grid"].prod(-1), keep_on_cpu=True),
            "grid": MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Mapping[str, Any]
    ) -> Sequence[PromptReplacement]:
        encoder, token = self.info.model.encoder, self.info.placeholder
        assert encoder is not None

        def repeated(index: int) -> list[int]:
            return [token] * encoder.rows(item_of(out_mm_kwargs[IMAGE][index]))

        return [PromptReplacement(modality=IMAGE, target=[token], replacement=repeated)]

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Prepare the images of a prompt.

        Raises:
            ValueError: the prompt has other placeholders than its images.
        """
        made = super().apply(inputs, timing_ctx)
        taken = sum(each.length for each in made["mm_placeholders"].get(IMAGE, ()))
        found = sum(each in self.info.model.placeholders for each in made["prompt_token_ids"])
        if found != taken:
            raise ValueError(f"the prompt has {found} placeholders, and its images have {taken} embeddings")
        return made
