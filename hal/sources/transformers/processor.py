"""Images and videos through transformers' processors, in the entry-point group ``hal.processors``."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from hal import Checkpoint
from hal.config.optional_libraries import need
from hal.errors import BatchError, CheckpointError, ConfigError
from hal.generation.llm.processor import Options, Preparation, Processor
from hal.generation.llm.videos import Video, VideoFile
from hal.nn import EncoderItem
from hal.nn.encoder import IMAGE, VIDEO

FILE = "preprocessor_config.json"
PIXELS = frozenset({"min_pixels", "max_pixels"})
"""Options: the least and the most pixels after resizing. Some processors count those of all frames of a video."""
SAMPLING = frozenset({"fps", "num_frames"})
"""Options of videos: how many frames are taken, in a second or at all. At most one is given."""
MOST_FRAMES = 1 << 16
"""The largest ``num_frames``. Some processors repeat frames of a video that has fewer."""


class TransformersProcessor(Processor):
    """The processors of transformers, as a checkpoint's ``preprocessor_config.json`` names them."""

    name: ClassVar[str] = "transformers"

    def open(self, checkpoint: Checkpoint) -> Preparation:
        """Return the checkpoint's processors.

        Raises:
            CheckpointError: the checkpoint has no preprocessor_config.json, or transformers cannot read it.
            ConfigError: transformers or pillow is not installed.
        """
        folder = Path(checkpoint.path)
        if not (folder / FILE).is_file():
            raise CheckpointError(
                f"{folder} has no {FILE}, which says how images are prepared",
                "leave the images out, or download the whole checkpoint of a model that reads them",
            )
        need("PIL", "vision", "an image")
        image_processing = need("transformers.models.auto.image_processing_auto", "vision", "an image")
        # The same pixels whether torchvision is installed or not.
        return _Prepared(folder, _read(folder, image_processing.AutoImageProcessor, backend="pil"))


def _read(folder: Path, kind: Any, **options: Any) -> Any:
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # transformers raises anything for a damaged file.
        raise CheckpointError(
            f"{folder / FILE} cannot be read: {type(error).__name__}: {error!s:.200}", "download the checkpoint again"
        ) from error


class _Prepared(Preparation):
    def __init__(self, folder: Path, images: Any) -> None:
        self._folder, self._images = folder, images
        if importlib.util.find_spec("torchvision") is not None:
            self.options = {IMAGE: PIXELS, VIDEO: PIXELS | SAMPLING}
        else:
            self.options = {IMAGE: PIXELS}

    @cached_property
    def _videos(self) -> Any:
        if VIDEO not in self.options:
            raise ConfigError(
                "transformers' processors of videos need torchvision, which is not installed",
                "pip install the version of torchvision that was made for your torch",
            )
        auto = need("transformers.models.auto.video_processing_auto", "vision", "a video")
        return _read(self._folder, auto.AutoVideoProcessor)

    def items(self, media: Sequence[Any], options: Options = MappingProxyType({})) -> list[EncoderItem]:
        for kind, given in options.items():
            if unknown := sorted(given.keys() - self.options.get(kind, frozenset())):
                known = ", ".join(sorted(self.options.get(kind, frozenset()))) or "none"
                raise BatchError(
                    f"a processor of {kind}s has no option {', '.join(unknown)!s:.70}", f"leave it out; it has {known}"
                )
            for name, value in given.items():
                whole = name != "fps"
                if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value > 0:
                    raise BatchError(f"the option {name} is {value!r:.40}", "give a number above 0")
                if name == "num_frames" and value > MOST_FRAMES:
                    raise BatchError(f"the option num_frames is {value!r:.40}", f"give at most {MOST_FRAMES}")
        found = []
        for index, each in enumerate(media):
            if isinstance(each, Video | VideoFile):
                found.append(self._video(each, index, options.get(VIDEO, {})))
            else:
                found.append(self._image(each, index, options.get(IMAGE, {})))
        return found

    def _image(self, image: Any, index: int, options: Mapping[str, Any]) -> EncoderItem:
        try:
            prepared = self._images(images=[image], return_tensors="pt", **_size(self._images, options))
            values, grid = prepared["pixel_values"], prepared["image_grid_thw"][0].tolist()
        except (ValueError, KeyError, TypeError) as error:
            raise BatchError(
                f"image {index} of {image.size[0]} x {image.size[1]} pixels cannot be prepared: {error!s:.200}",
                "give an image of which neither side is many times the other",
            ) from error
        return _item(IMAGE, values, grid)

    def _sampled(self, video: Video | VideoFile, where: str, options: Mapping[str, Any]) -> Video:
        """Return the frames that the processor chooses of a video."""
        asked = {name: options[name] for name in SAMPLING & options.keys()}
        if isinstance(video, Video) and video.sampled:
            if asked:
                raise BatchError(
                    f"the frames of {where} were chosen before, and {', '.join(sorted(asked))} is given",
                    "leave it out, or give all frames of the video",
                )
            return video
        if isinstance(video, VideoFile) and not asked and video.fps is not None:
            asked = {"fps": video.fps}
        if not asked and not self._videos.do_sample_frames:
            return video if isinstance(video, Video) else video.read(range(video.total))
        utilities = need("transformers.video_utils", "vision", "a video")
        metadata = utilities.VideoMetadata(video.total, video.rate, duration=video.total / video.rate)
        try:
            places = torch.as_tensor(self._videos.sample_frames(metadata=metadata, **asked)).tolist()
        except ZeroDivisionError:  # Qwen2-VL's processor rounds a single frame down to none.
            places = [0]
        except (ValueError, TypeError, ArithmeticError) as error:
            raise BatchError(
                f"{where} has {video.total} frames, of which the processor cannot choose: {error!s:.200}",
                "give another fps, or a longer video",
            ) from error
        # Qwen2-VL's processor adds up steps, whose sum may round to the end.
        return video.read([each for each in places if each < video.total])

    def _video(self, given: Video | VideoFile, index: int, options: Mapping[str, Any]) -> EncoderItem:
        video = self._sampled(given, given.where if isinstance(given, VideoFile) else f"video {index}", options)
        frames = torch.as_tensor(video.frames)
        merged = self._videos.temporal_patch_size  # frames, of which Qwen3-VL's processor needs as many at least
        if len(frames) < merged:
            frames = torch.cat([frames, frames[-1:].expand(merged - len(frames), *frames.shape[1:])])
        try:
            prepared = self._videos(
                videos=[frames.permute(0, 3, 1, 2)],
                do_sample_frames=False,
                return_tensors="pt",
                **_size(self._videos, options),
            )
            values, grid = prepared["pixel_values_videos"], prepared["video_grid_thw"][0].tolist()
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise BatchError(
                f"video {index} with frames {tuple(frames.shape)} cannot be prepared: {error!s:.200}",
                "give frames of which neither side is many times the other",
            ) from error
        places = [*video.places]
        seconds = merged * video.total / len(places) / video.rate
        places += [places[-1]] * (-len(places) % merged)
        # The time of merged frames is the middle of the first and the last.
        times = tuple((places[at] + places[at + merged - 1]) / 2 / video.rate for at in range(0, len(places), merged))
        return _item(VIDEO, values, grid, seconds, times)


def _size(processor: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument that limits the pixels, if an option does."""
    if not PIXELS & options.keys():
        return {}
    least, most = (
        options.get(name, processor.size[edge])
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    return {"size": {"shortest_edge": least, "longest_edge": most}}


def _item(
    kind: str,
    values: Tensor,
    grid: list[int],
    seconds: float | None = None,
    times: tuple[float, ...] | None = None,
) -> EncoderItem:
    values = values.to(torch.float32).contiguous()
    digest = hashlib.sha256(repr((grid, seconds)).encode() + values.numpy().tobytes()).digest()
    return EncoderItem(kind, values, (grid[0], grid[1], grid[2]), digest, seconds, times)
