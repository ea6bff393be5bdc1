"""Images and videos as callers give them, read with bounded memory."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hal.config.optional_libraries import need
from hal.errors import BatchError

MOST_PIXELS = 1 << 26
"""The most pixels of an image, and of all frames of a video. Its decoded form takes three or four bytes for each."""
MOST_BYTES = 1 << 28
"""The most bytes of a file."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""The formats that are decoded. Others, such as SVG, are refused."""
_REMEDY = f"give an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


@attrs.frozen(eq=False)
class Video:
    """Frames of a video.

    Attributes:
        frames: ``[frames, height, width, 3]``, uint8, as an array or a tensor on the CPU.
        rate: the frames of the video in a second.
        places: the number of each frame in the video.
        total: the number of the video's frames.
        sampled: whether the frames were chosen from the video. Of all frames, the processor may choose some.
    """

    frames: Any
    rate: float
    places: tuple[int, ...]
    total: int
    sampled: bool = True


def read_image(given: Any, where: str) -> Any:
    """Return an image of PIL, in RGB.

    Args:
        given: a path, the bytes of a file, a data URL, or an image of PIL. Addresses in a network are not fetched.
        where: the subject of an error, such as ``image 0``.

    Raises:
        BatchError: it cannot be read, is in another format, or is too large.
        ConfigError: the package pillow is not installed.
    """
    library = need("PIL.Image", "vision", "an image")
    if isinstance(given, library.Image):
        return _decoded(given, where, library)
    content = _content(given, where)
    if len(content) > MOST_BYTES:
        raise BatchError(f"{where} has {len(content) >> 20} MiB, more than {MOST_BYTES >> 20}", "give a smaller file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", library.DecompressionBombWarning)  # _decoded has the limit
            opened = library.open(io.BytesIO(content), formats=FORMATS)
    except library.DecompressionBombError as error:
        raise BatchError(f"{where} is too large: {error}", "give a smaller image") from None
    except library.UnidentifiedImageError:  # Its message names a Python object.
        raise BatchError(f"{where} is no image that can be read: its format is not known", _REMEDY) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise BatchError(f"{where} is no image that can be read: {error!s:.200}", _REMEDY) from None
    return _decoded(opened, where, library)


def _decoded(image: Any, where: str, library: Any) -> Any:
    """Return an image of which only the header may have been read, in RGB, on white where it is transparent."""
    width, height = image.size
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise BatchError(
            f"{where} has {width} x {height} pixels; the limit is {MOST_PIXELS}", "make it smaller before you give it"
        )
    try:
        image.load()
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = library.new("RGBA", image.size, "white")
            return library.alpha_composite(white, image).convert("RGB")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, MemoryError) as error:
        raise BatchError(f"{where} cannot be decoded: {error!s:.200}", "check that the file is complete") from None


def _content(given: Any, where: str) -> bytes:
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str) and given.startswith("data:"):
        head, comma, text = given.partition(",")
        if not comma or not head.endswith(";base64"):
            raise BatchError(f"{where} is a data URL without base64: {head!r:.60}", "encode the image in base64")
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BatchError(f"{where} is no base64: {error}", "encode the image in base64") from None
    if isinstance(given, str) and given.partition("://")[0] in ("http", "https", "ftp", "file"):
        raise BatchError(
            f"{where} is the address {given!r:.60}, which is not fetched", "download it, and give its path"
        )
    if not isinstance(given, str | Path):
        raise BatchError(f"{where} is a {type(given).__name__}", "give a path, bytes, a data URL or an image of PIL")
    path = Path(given)
    try:
        if not path.is_file():
            raise BatchError(f"{where} is {str(path)!r:.200}, which is no file", "give the path of an image")
        if path.stat().st_size > MOST_BYTES:
            raise BatchError(f"{where} has more than {MOST_BYTES >> 20} MiB", "give a smaller file")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise BatchError(f"{where} cannot be read: {error}", "check the path") from None


def read_video(given: Any, rate: Any, where: str) -> Video:
    """Return a video from frames that a caller has chosen.

    Args:
        given: the frames, of one size: a sequence of what :func:`read_image` reads.
        rate: the frames in a second.
        where: the subject of an error, such as ``message 0``.

    Raises:
        BatchError: there are no frames, a frame cannot be read, sizes differ, all have too many pixels, or the rate is
            not positive.
        ConfigError: the package pillow is not installed.
    """
    if isinstance(given, str | Path | bytes) or not isinstance(given, Sequence):
        raise BatchError(
            f"{where} has a video, and hal decodes no files of videos",
            'give frames that you chose, {"type": "video", "video": [frame, ...], "fps": 2}',
        )
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < float("inf"):
        raise BatchError(f"{where} has a video with fps = {rate!r:.40}", "give the frames in a second as fps")
    need("PIL.Image", "vision", "a video")
    import numpy

    frames, pixels = [], 0
    for index, each in enumerate(given):
        frames.append(numpy.asarray(read_image(each, f"frame {index} of {where}")))
        if (pixels := pixels + frames[-1].shape[0] * frames[-1].shape[1]) > MOST_PIXELS:
            raise BatchError(
                f"{where} has a video with more than {MOST_PIXELS} pixels in its first {index + 1} frames",
                "give fewer or smaller frames",
            )
    if len({each.shape for each in frames}) != 1:
        sizes = sorted({f"{each.shape[1]} x {each.shape[0]}" for each in frames})
        raise BatchError(
            f"{where} has a video of {len(frames)} frames of {', '.join(sizes) or 'no size'!s:.70}",
            "give one or more frames of one size",
        )
    return Video(numpy.stack(frames), float(rate), tuple(range(len(frames))), len(frames))


def without_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages as chat templates read them, and the images and videos of their parts, in order.

    A part is ``{"type": "image", "image": ...}``, or as in OpenAI's API
    ``{"type": "image_url", "image_url": {"url": ...}}``. The template gets ``{"type": "image"}``. A video is
    ``{"type": "video", "video": [frame, ...], "fps": ...}``.

    Raises:
        BatchError: a part has another type than text, images and videos, or none of what its type says.
    """
    found, images = [], []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            found.append(message)
            continue
        parts = []
        for each in content:
            kind = each.get("type") if isinstance(each, Mapping) else None
            if kind == "text":
                parts.append(each)
                continue
            if kind in ("video", "video_url"):
                images.append(read_video(each.get("video"), each.get("fps"), f"message {index}"))
                parts.append({"type": "video"})
                continue
            image = each.get("image") if kind == "image" else None
            if kind == "image_url":
                url = each.get("image_url")
                image = url.get("url") if isinstance(url, Mapping) else url
            if image is None:
                raise BatchError(
                    f"message {index} has a part {each!r:.70}",
                    'give {"type": "text", "text": ...} or {"type": "image", "image": ...}',
                )
            parts.append({"type": "image"})
            images.append(image)
        found.append({**message, "content": parts})
    return found, images  # type: ignore[return-value]
