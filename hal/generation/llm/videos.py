"""Videos as callers give them: frames, or files, which are decoded with bounded memory."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from hal.config.optional_libraries import need
from hal.errors import BatchError
from hal.generation.llm.images import MOST_PIXELS, read_content, read_image

log = logging.getLogger("hal.generation")

FORMATS = ("avi", "matroska", "mov", "mpegts")
"""FFmpeg's names of the formats that are read. Others, such as playlists, which name further files, are refused."""
MOST_FRAME_PIXELS = 1 << 24
"""The most pixels of a frame of a file. A decoder may hold 16 frames beside those that are taken."""
MOST_DECODED_PIXELS = 1 << 36
"""The most pixels of all frames of a file, 18 minutes of 1920 x 1080 at 30 frames a second. They bound the time."""
LEAST_DECODED = 0.9
"""The least share of frames that can be decoded. Files that were cut without encoding again have frames too many."""
FRAMES_URL = "data:video/jpeg;base64,"
"""The beginning of a data URL of frames, with commas between them."""
FRAMES_URL_RATE = 1.0
"""The frames of such a URL in a second, unless something else is given. vLLM has the same default."""
_REMEDY = "give a video in AVI, Matroska, MOV, MP4, MPEG-TS or WebM"


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

    def read(self, places: Sequence[int]) -> Video:
        """Return some of the frames of a video that is not sampled. Those that are missing at the end are the last one.

        Args:
            places: their numbers, each less than ``total``; they may repeat.

        Raises:
            BatchError: repeated frames have too many pixels.
        """
        _, height, width, _ = self.frames.shape
        if len(places) > len(self.places) and len(places) * height * width > MOST_PIXELS:
            raise BatchError(
                f"{len(places)} frames of a video that has {len(self.places)} have more than {MOST_PIXELS} pixels",
                "take fewer frames",
            )
        chosen = [min(each, len(self.places) - 1) for each in places]
        return attrs.evolve(self, frames=self.frames[chosen], places=tuple(places), sampled=True)


@attrs.frozen(eq=False)
class VideoFile:
    """A video in a file, of which the header was read.

    Attributes:
        where: the subject of an error, such as ``the video of message 0``.
        rate: its frames in a second.
        width: in pixels, of a frame as it is stored. A file may say that its frames are turned.
        height: likewise.
        fps: how many frames of a second to take; if None, the processor decides.
    """

    content: bytes
    where: str
    rate: float
    total: int
    width: int
    height: int
    fps: float | None

    @classmethod
    def open(cls, content: bytes, fps: float | None, where: str) -> VideoFile:
        """Read the header of a file.

        Raises:
            BatchError: it is no video in a known format, has no frames, or is too large.
            ConfigError: the package av is not installed.
        """
        with _decoding(content, where) as (container, stream):
            width, height, rate = stream.width, stream.height, float(stream.average_rate or stream.guessed_rate or 0)
            # Matroska and MPEG-TS do not say how many there are.
            total = stream.frames or sum(bool(packet.size) for packet in container.demux(stream))
        if not (width > 0 and height > 0 and total > 0 and rate > 0):
            raise BatchError(
                f"{where} has {total} frames of {width} x {height} pixels, {rate:g} in a second",
                "check that the file is complete",
            )
        if width * height > MOST_FRAME_PIXELS or total * width * height > MOST_DECODED_PIXELS:
            raise BatchError(
                f"{where} has {total} frames of {width} x {height} pixels; the limit is {MOST_FRAME_PIXELS} pixels in "
                f"a frame and {MOST_DECODED_PIXELS} in all",
                "give a shorter or smaller video",
            )
        return cls(content, where, rate, total, width, height, fps)

    def read(self, places: Sequence[int]) -> Video:
        """Decode frames. A few that are missing at the end are those of the last one, with a warning.

        Args:
            places: their numbers, which may repeat.

        Raises:
            BatchError: they have too many pixels, or the file is damaged.
        """
        if len(places) * (size := self.width * self.height) > MOST_PIXELS:
            fitting = MOST_PIXELS // size / self.total * self.rate
            raise BatchError(
                f"{len(places)} frames of {self.where} have {self.width} x {self.height} pixels; the limit is "
                f"{MOST_PIXELS} pixels in all",
                f"take fewer frames, with fps of at most {int(fitting * 100) / 100:g}, or give a smaller video",
            )
        import numpy

        wanted, found, index = set(places), dict[int, Any](), -1
        with _decoding(self.content, self.where) as (container, stream):
            for index, frame in enumerate(container.decode(stream)):
                if index in wanted:
                    if (frame.width, frame.height) != (self.width, self.height):
                        raise BatchError(
                            f"{self.where} has frames of {self.width} x {self.height} and of "
                            f"{frame.width} x {frame.height} pixels",
                            "give a video whose frames have one size",
                        )
                    found[index] = _pixels(frame)
                if len(found) == len(wanted):
                    break
        missing = wanted - found.keys()
        if not wanted or (missing and index + 1 < LEAST_DECODED * self.total):
            raise BatchError(
                f"{self.where} has {index + 1} frames that can be decoded; by its header and packets it has "
                f"{self.total}",
                "check that the file is complete",
            )
        if missing:
            log.warning(
                "%s has %d frames that can be decoded, of %d; the last is taken for %d others",
                self.where,
                index + 1,
                self.total,
                len(missing),
            )
            found |= dict.fromkeys(missing, _pixels(frame))
        return Video(numpy.stack([found[each] for each in places]), self.rate, tuple(places), self.total)


def _pixels(frame: Any) -> Any:
    """Return the pixels of a frame, ``[height, width, 3]``, turned as its display matrix says."""
    import numpy

    return numpy.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


@contextlib.contextmanager
def _decoding(content: bytes, where: str) -> Iterator[tuple[Any, Any]]:
    """Open a file inside the block, and yield its container and its stream of video."""
    library = need("av", "vision", "the file of a video")
    # No format of these opens other files, and no protocol could.
    options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": ""}
    try:
        with library.open(io.BytesIO(content), options=options) as container:
            if not container.streams.video:
                raise BatchError(f"{where} has no video in it", _REMEDY)
            stream = container.streams.video[0]
            stream.codec_context.options = {"max_pixels": str(MOST_FRAME_PIXELS)}  # whatever the header says
            yield container, stream
    except (library.error.FFmpegError, MemoryError) as error:
        problem = getattr(error, "strerror", None) or error
        raise BatchError(f"{where} is no video that can be read: {problem!s:.200}", _REMEDY) from None


def read_video(given: Any, fps: Any, where: str) -> Video | VideoFile:
    """Return a video, of which a file is not decoded yet.

    Args:
        given: the frames, of one size, each as :func:`read_image` reads it; or a file, as a path, bytes or a data URL.
        fps: the frames in a second; of a file, how many to take, or None.
        where: the subject of an error, such as ``the video of message 0``.

    Raises:
        BatchError: there are no frames, a frame or the file cannot be read, sizes differ, all have too many pixels, or
            ``fps`` is not positive.
        ConfigError: the package pillow, or for a file the package av, is not installed.
    """
    is_url = isinstance(given, str) and given.startswith(FRAMES_URL)
    is_file = not is_url and isinstance(given, str | Path | bytes | bytearray | memoryview)
    if fps is None and is_url:
        fps = FRAMES_URL_RATE
    is_rate = isinstance(fps, int | float) and not isinstance(fps, bool) and 0 < fps <= sys.float_info.max
    if not is_rate and not (is_file and fps is None):
        raise BatchError(f"{where} has fps = {fps!r:.40}", "give the frames in a second as fps")
    if is_file:
        return VideoFile.open(read_content(given, where, "a video"), fps, where)
    if is_url:
        head = FRAMES_URL.replace("video", "image")
        given = [head + each for each in given.removeprefix(FRAMES_URL).split(",")]
    if not isinstance(given, Sequence):
        raise BatchError(f"{where} is a {type(given).__name__}", "give a list of frames, a path, bytes or a data URL")
    return _stacked(given, float(fps), where)


def _stacked(given: Sequence[Any], rate: float, where: str) -> Video:
    need("PIL.Image", "vision", "a video")
    import numpy

    frames, pixels = [], 0
    for index, each in enumerate(given):
        frames.append(numpy.asarray(read_image(each, f"frame {index} of {where}")))
        if (pixels := pixels + frames[-1].shape[0] * frames[-1].shape[1]) > MOST_PIXELS:
            raise BatchError(
                f"{where} has more than {MOST_PIXELS} pixels in its first {index + 1} frames",
                "give fewer or smaller frames",
            )
    if len({each.shape for each in frames}) != 1:
        sizes = sorted({f"{each.shape[1]} x {each.shape[0]}" for each in frames})
        raise BatchError(
            f"{where} has {len(frames)} frames of {', '.join(sizes) or 'no size'!s:.70}",
            "give one or more frames of one size",
        )
    return Video(numpy.stack(frames), rate, tuple(range(len(frames))), len(frames))
