"""Tests for files of videos: what is read of them, limits, and damaged files."""

from __future__ import annotations

import base64
import io
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy
import pytest

from hal.errors import BatchError, ConfigError
from hal.generation.llm import videos
from hal.generation.llm.videos import Video, VideoFile, read_video

av = pytest.importorskip("av", reason="hal reads files of videos with av, of the extra vision")

FRAMES = 10


def film(
    frames: int = FRAMES,
    width: int = 32,
    height: int = 24,
    kind: str = "mp4",
    codec: str = "mpeg4",
    rate: int = 5,
    picture: Any = None,
) -> bytes:
    """Return the file of a video whose frames become lighter, or show a picture."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            grey = numpy.full((height, width, 3), 255 * index // frames, numpy.uint8)
            shown = grey if picture is None else picture
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def sound() -> bytes:
    """Return a file that has sound alone."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(numpy.zeros((1, 1024), numpy.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("mp4", "mpeg4"),
        ("mov", "libx264"),
        ("matroska", "mpeg4"),
        ("webm", "libvpx-vp9"),
        ("avi", "mpeg4"),
        ("mpegts", "mpeg4"),
    ],
)
def test_frames_of_a_file(kind: str, codec: str) -> None:
    codec = "mpeg4" if codec not in av.codecs_available else codec
    read = VideoFile.open(film(kind=kind, codec=codec), None, "the video")
    assert (read.total, read.rate, read.width, read.height) == (FRAMES, 5.0, 32, 24)
    found = read.read([0, 7, 3, 7])
    assert (found.frames.shape, found.frames.dtype) == ((4, 24, 32, 3), numpy.uint8)
    assert (found.places, found.total, found.rate, found.sampled) == ((0, 7, 3, 7), FRAMES, 5.0, True)
    expected = [255 * index // FRAMES for index in found.places]
    assert numpy.abs(found.frames.mean((1, 2, 3)) - expected).max() < 4


@pytest.mark.parametrize("degrees", [-90, 90, 180])
def test_frames_are_turned_as_the_file_says(degrees: int) -> None:
    """As cameras write it: into the matrix of the track."""
    grey = numpy.zeros((24, 32, 3), numpy.uint8)
    grey[:8, :8] = 255
    content = film(1, picture=grey)
    sine, cosine = round(math.sin(math.radians(degrees))) << 16, round(math.cos(math.radians(degrees))) << 16
    at = content.index(b"tkhd") + 44
    turned = content[:at] + struct.pack(">9i", cosine, -sine, 0, sine, cosine, 0, 0, 0, 1 << 30) + content[at + 36 :]
    found = VideoFile.open(turned, None, "the video").read([0]).frames[0].astype(int)
    assert found.shape == ((24, 32, 3) if degrees == 180 else (32, 24, 3))
    assert numpy.abs(found - numpy.rot90(grey, degrees // 90)).mean() < 8


def test_a_path_bytes_and_a_data_url_are_one_file(tmp_path: Path) -> None:
    content = film()
    (tmp_path / "film.mp4").write_bytes(content)
    url = "data:video/mp4;base64," + base64.b64encode(content).decode()
    for given in (tmp_path / "film.mp4", str(tmp_path / "film.mp4"), content, url):
        read = read_video(given, 2, "the video")
        assert isinstance(read, VideoFile)
        assert (read.content, read.fps) == (content, 2)


def test_a_data_url_of_frames() -> None:
    """The form of vLLM's clients; its frames are one a second unless fps says otherwise."""
    image = pytest.importorskip("PIL.Image", reason="hal reads frames with pillow, of the extra vision")
    frames = []
    for grey in (10, 90):
        buffer = io.BytesIO()
        image.new("RGB", (16, 8), (grey,) * 3).save(buffer, "JPEG")
        frames.append(base64.b64encode(buffer.getvalue()).decode())
    url = "data:video/jpeg;base64," + ",".join(frames)
    read = read_video(url, None, "the video")
    assert isinstance(read, Video)
    assert (read.frames.shape, read.rate, read.places) == ((2, 8, 16, 3), 1.0, (0, 1))
    assert read.frames.mean((1, 2, 3)).round().tolist() == [10, 90]
    assert read_video(url, 4, "the video").rate == 4.0
    with pytest.raises(BatchError, match="frame 1 of the video is no image"):
        read_video("data:video/jpeg;base64," + frames[0] + ",", None, "the video")


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no file": (lambda: "none.mp4", "is no file.*|none.mp4"),
    "an empty file": (lambda: b"", "no video that can be read"),
    "a text": (lambda: b"hello " * 100, "no video that can be read"),
    "an image": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(64), "no video that can be read"),
    "a playlist, which names other files": (lambda: PLAYLIST, "no video that can be read"),
    "sound alone": (sound, "has no video in it"),
    "no index": (lambda: film()[:300], "no video that can be read"),
    "an address": (lambda: "https://example.org/cat.mp4", "not fetched"),
    "no base64": (lambda: "data:video/mp4;base64,!!", "no base64"),
    "a number": (lambda: 3, "is a int"),
    "large frames": (lambda: film(1, 4104, 4096), "4104 x 4096 pixels; the limit is 16777216 pixels in a frame"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(BatchError, match=message):
        read_video(make(), None if name != "a number" else 1, "the video of message 0")


@pytest.mark.parametrize("fps", [0, -1, True, "2", float("inf"), float("nan"), 10**400])
def test_a_rate_of_no_use(fps: Any) -> None:
    with pytest.raises(BatchError, match="the video has fps = "):
        read_video(film(), fps, "the video")


def test_a_file_that_ends_early() -> None:
    """Its header is complete, as in files whose download stopped."""
    whole = film(60, 320, 240, kind="avi")
    read = VideoFile.open(whole[: len(whole) // 2], None, "the video")
    assert read.read([0]).frames.shape == (1, 240, 320, 3)
    with pytest.raises(BatchError, match=r"the video has \d+ frames that can be decoded; by its header"):
        read.read([0, read.total + 100])


def test_a_header_with_a_few_frames_too_many(caplog: pytest.LogCaptureFixture) -> None:
    """As that of a file which was cut without encoding it again."""
    read = attrs.evolve(VideoFile.open(film(40), None, "the video"), total=42)
    found = read.read([0, 39, 41])
    assert (found.frames[1] == found.frames[2]).all()
    assert "40 frames that can be decoded, of 42; the last is taken for 1 others" in caplog.text


def test_more_pixels_than_memory_is_bounded_to() -> None:
    """The error names a rate that fits."""
    read = VideoFile.open(film(33, 1920, 1080, rate=10), None, "the video")
    with pytest.raises(BatchError, match=r"33 frames of the video have 1920 x 1080 pixels; the limit") as raised:
        read.read(range(33))
    assert "with fps of at most 9.69" in raised.value.remedy
    assert read.read(range(0, 33, 20)).frames.shape == (2, 1080, 1920, 3)


def test_a_file_of_too_many_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "MOST_DECODED_PIXELS", FRAMES * 32 * 24 - 1)
    with pytest.raises(BatchError, match="10 frames of 32 x 24 pixels; the limit is"):
        VideoFile.open(film(), None, "the video")


def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    content = film()
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match="the file of a video needs av, which cannot be imported") as raised:
        read_video(content, None, "the video")
    assert "torch-hal[vision]" in raised.value.remedy
