"""Images and videos in vLLM's front end: hal's processors prepare them as they do for ``hal.LLM``.

vLLM asks a model's class how its inputs are prepared. For models of hal that have an encoder, :func:`register` gives it
a class with hal's processor. vLLM makes no instance of it, since hal's worker loads the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdateDetails,
)

from hal import Checkpoint, architectures
from hal.checkpoint.model_registry import find_model
from hal.checkpoint.random_weights import meta_model
from hal.engines.vllm.request import fields_of, item_of
from hal.engines.vllm.vllm_config import PREPARED
from hal.errors import BatchError, HalError
from hal.generation.llm.images import read_image
from hal.generation.llm.processor import Preparation, open_processor
from hal.generation.llm.videos import Video
from hal.nn import CausalLM, EncoderItem
from hal.nn.encoder import IMAGE, VIDEO

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
    """A model with images or videos, as far as vLLM asks before a worker loads it."""

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
    """What vLLM asks about the images and videos of a model."""

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
        """What prepares its images and videos."""
        return open_processor(self.checkpoint)

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, which writes the times of frames."""
        return self.checkpoint.tokenizer()

    @cached_property
    def placeholders(self) -> Mapping[str, int]:
        """The tokens that stand for an embedding, by the kind of the item."""
        known = self.preparation.options
        return {kind: token for token, kind in self.model.placeholders.items() if kind in known}

    def replacement(self, item: EncoderItem) -> list[int]:
        """Return the tokens that replace an item's placeholder."""
        encode = self.tokenizer.encode
        return self.model.expand(
            [self.placeholders[item.kind]], [item], lambda text: encode(text, add_special_tokens=False).ids
        )

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return that prompts have any number of images, and of videos if they can be prepared.

        Raises:
            BatchError: the server's options are none of hal's processor.
        """
        self.preparation.items((), self.options({}))  # vLLM asks at the start, before a request needs them.
        return dict.fromkeys(self.placeholders)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return 1, so that vLLM's budgets of embeddings are those of a step's tokens, which hal measures."""
        return dict.fromkeys(self.placeholders, 1)

    def get_data_parser(self) -> MultiModalDataParser:
        """Return vLLM's parser, which passes on the rate of a video's frames."""
        return MultiModalDataParser(video_needs_metadata=True)

    def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        """Return the options of hal's processor."""
        return {f"{kind}s_kwargs": set(names) for kind, names in self.preparation.options.items()}

    def options(self, given: Mapping[str, object]) -> dict[str, Mapping[str, Any]]:
        """Return the options of the server and of a request, by the kind of the item.

        Raises:
            BatchError: an option is none of hal's processor.
        """
        merged = self._merge_and_resolve_mm_processor_kwargs(given)
        found = {kind: merged.pop(f"{kind}s_kwargs", {}) for kind in self.preparation.options}
        if merged:
            known = sorted({name for names in self.preparation.options.values() for name in names})
            raise BatchError(
                f"hal's processor has no option {', '.join(sorted(merged))!s:.70} of mm_processor_kwargs",
                f"leave it out; it has {', '.join(known) or 'none'}",
            )
        return found


class NoDummies(BaseDummyInputsBuilder[ImageInfo]):
    """Makes small images and videos. The worker measures the largest step of the encoder itself."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Return a text with the placeholders."""
        placeholders = [[token] * mm_counts.get(kind, 0) for kind, token in self.info.placeholders.items()]
        text: str = self.info.get_tokenizer().decode([each for own in placeholders for each in own])
        return text

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        """Return the images and videos."""
        made: dict[str, Any] = {}
        if images := mm_counts.get(IMAGE, 0):
            made[IMAGE] = self._get_dummy_images(width=64, height=64, num_images=images)
        if videos := mm_counts.get(VIDEO, 0):
            frames = self._get_dummy_videos(width=64, height=64, num_frames=2, num_videos=videos)
            made[VIDEO] = [(each, {"fps": 1.0, "total_num_frames": 2, "frames_indices": [0, 1]}) for each in frames]
        return made


class ImageProcessor(BaseMultiModalProcessor[ImageInfo]):
    """Prepares images and videos as ``hal.LLM`` does, and repeats their placeholders."""

    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> dict[str, Tensor]:
        try:
            media: list[Any] = [
                read_image(each, f"image {index}") for index, each in enumerate(hf_data.get("images", ()))
            ]
            for index, (frames, metadata) in enumerate(hf_data.get("videos", ())):
                media.append(_video(frames, metadata, f"video {index}"))
            items = self.info.preparation.items(media, self.info.options(hf_kwargs))
        except BatchError as error:
            raise ValueError(str(error)) from error  # which vLLM answers with the status 400
        return {name: each for kind in (IMAGE, VIDEO) for name, each in fields_of(kind, items).items()}

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Tensor], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        # vLLM would drop other fields for items in a cached prefix, which hal may need when a request is resumed.
        found = {}
        for kind in (IMAGE, VIDEO):
            if (grids := hf_inputs.get(f"{kind}_grid")) is None:
                continue
            for name, sizes in (("values", grids.prod(-1)), ("grid", None), ("seconds", None), ("times", grids[:, 0])):
                if sizes is None:
                    config = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
                else:
                    config = MultiModalFieldConfig.flat_from_sizes(kind, sizes, keep_on_cpu=True)
                if f"{kind}_{name}" in hf_inputs:
                    found[f"{kind}_{name}"] = config
        return found

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Mapping[str, Any]
    ) -> Sequence[PromptReplacement]:
        def repeated(kind: str, token: int, index: int) -> PromptUpdateDetails:
            tokens = self.info.replacement(item_of(kind, out_mm_kwargs[kind][index]))
            return PromptUpdateDetails.select_token_id(tokens, token)

        return [
            PromptReplacement(modality=kind, target=[token], replacement=partial(repeated, kind, token))
            for kind, token in self.info.placeholders.items()
        ]

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Prepare the images and videos of a prompt.

        Raises:
            ValueError: the prompt has other placeholders than its images and videos.
        """
        made = super().apply(inputs, timing_ctx)
        taken = sum(each.get_num_embeds() for own in made["mm_placeholders"].values() for each in own)
        found = sum(each in self.info.model.placeholders for each in made["prompt_token_ids"])
        if found != taken:
            raise ValueError(f"the prompt has {found} placeholders, and its images and videos have {taken} embeddings")
        return made


def _video(frames: Any, given: Mapping[str, Any], where: str) -> Video:
    """Return a video from the frames that vLLM has decoded, and what it knows of them.

    Raises:
        BatchError: they are no frames in RGB, or their rate is unknown.
    """
    shape, rate = tuple(frames.shape), float(given.get("fps") or 0)
    places = tuple(given.get("frames_indices") or range(shape[0]))
    if len(shape) != 4 or shape[-1] != 3 or not shape[0] or len(places) != shape[0]:
        raise BatchError(f"{where} has frames {shape}", "give frames in RGB, [frames, height, width, 3]")
    if not rate > 0:
        raise BatchError(f"{where} has no rate of frames", "give fps in its metadata")
    total = int(given.get("total_num_frames") or places[-1] + 1)
    return Video(frames, rate, places, total, not given.get("do_sample_frames", False))
