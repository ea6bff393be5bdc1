"""Tests for prompts with images: reading files, preparing them, conversations, and ``hal generate --image``."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from helpers.distributions import installed
from helpers.seeing import END_ID, IMAGE_ID, START_ID, VIDEO_ID, Story, build, their_logits
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

import hal
from hal.errors import BatchError, CheckpointError, ConfigError, ModelError
from hal.generation.llm.images import MOST_PIXELS, read_image
from hal.generation.llm.videos import Video, read_video
from hal.nn import EncoderItem

Image = pytest.importorskip("PIL.Image", reason="hal reads images with pillow, of the extra vision")
transformers = pytest.importorskip("transformers", reason="transformers prepares images")

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }} {% else %}<start> <{{ p.type }}> <end> {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}answer{% endif %}"
)
WORDS = ("user", "answer", "what", "is", "this", "and", "that")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model, with a tokenizer of words, a chat template and an image processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("seeing")
    model = build("Qwen3VL", 4, path)
    names = {IMAGE_ID: "<image>", VIDEO_ID: "<video>", START_ID: "<start>", END_ID: "<end>"}
    words = {index: WORDS[index] if index < len(WORDS) else f"w{index}" for index in range(97)} | names
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in words.items()}, unk_token="w89"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2}
    processor |= {"merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return model, path


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Any, Path]) -> Any:
    with hal.LLM(checkpoint[1], backend="cpu", dtype="float32", max_length=256, max_sequences=4) as made:
        yield made


def picture(width: int = 23, height: int = 17, seed: int = 0) -> Any:
    values = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(values.to(torch.uint8).numpy())


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def asking(*images: Any, text: str = "what is this") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": each} for each in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def their_answer(checkpoint: tuple[Any, Path], images: list[Any], text: list[str], tokens: int = 5) -> list[int]:
    """Return transformers' greedy answer, from the pixels of its own processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model, path = checkpoint
    found = Qwen2VLImageProcessorPil.from_pretrained(path)(images=images, return_tensors="pt")
    grids, prompt, items, start = found["image_grid_thw"].tolist(), [0], [], 0
    for grid in grids:
        count = grid[0] * grid[1] * grid[2]
        items.append(EncoderItem("image", found["pixel_values"][start : start + count], tuple(grid), b""))
        prompt += [START_ID, *[IMAGE_ID] * (count // 4), END_ID]
        start += count
    prompt += [*map(WORDS.index, text), 1]
    known = list(prompt)
    for _ in range(tokens):
        known.append(int(their_logits(model, Story(known, items, len(prompt)))[-1].argmax()))
    return known[len(prompt) :]


@pytest.mark.shows("images", "hal.LLM")
def test_a_conversation_about_images(checkpoint: tuple[Any, Path], llm: hal.LLM, tmp_path: Path) -> None:
    first, second = picture(23, 17, 1), picture(40, 9, 2)
    (tmp_path / "first.png").write_bytes(encoded(first))
    expected = their_answer(checkpoint, [first, second], ["what", "is", "this"])
    url = "data:image/png;base64," + base64.b64encode(encoded(second)).decode()
    for given in ((first, second), (str(tmp_path / "first.png"), encoded(second)), (tmp_path / "first.png", url)):
        (found,) = llm.chat(asking(*given), max_new_tokens=5, temperature=0.0, ignore_eos=True)
        assert list(found.token_ids) == expected
    part = {"type": "image_url", "image_url": {"url": url}}
    message = {
        "role": "user",
        "content": [{"type": "image", "image": first}, part, {"type": "text", "text": "what is this"}],
    }
    prompt = llm.chat_prompt([message])
    assert "".join(llm.stream(prompt, max_new_tokens=5, temperature=0.0, ignore_eos=True)) == found.text


def test_texts_and_images_together(checkpoint: tuple[Any, Path], llm: hal.LLM) -> None:
    """Two conversations with other images, and a text, in one call."""
    images = picture(12, 30, 3), picture(30, 12, 4)
    conversations = [asking(images[0]), [{"role": "user", "content": "what is that"}], asking(images[1])]
    found = llm.chat(conversations, max_new_tokens=5, temperature=0.0, ignore_eos=True)
    expected = [their_answer(checkpoint, [each], ["what", "is", "this"]) for each in images]
    assert [list(found[0].token_ids), list(found[2].token_ids)] == expected


def test_two_samples_of_a_prompt_share_its_image(llm: hal.LLM) -> None:
    found = llm.chat(asking(picture(28, 28, 5)), n=2, max_new_tokens=4, temperature=0.0, ignore_eos=True)
    assert found[0].token_ids == found[1].token_ids


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that says that it has these sizes, and has no pixels."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", size), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*each) for each in chunks)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (lambda folder: folder / "none.png", "is no file"),
    "a folder": (lambda folder: folder, "is no file"),
    "an empty file": (lambda folder: b"", "no image that can be read"),
    "a text": (lambda folder: b"hello " * 100, "no image that can be read"),
    "svg": (
        lambda folder: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "no image that can be read",
    ),
    "20,000 x 20,000": (lambda folder: png_header(20_000, 20_000), "too large|pixels; the limit"),
    "more pixels than allowed": (lambda folder: png_header(MOST_PIXELS // 8192 + 1, 8192), "pixels; the limit"),
    "no pixels": (lambda folder: png_header(9, 9), "cannot be decoded"),
    "truncated jpeg": (lambda folder: encoded(picture(200, 200), "JPEG")[:2000], "cannot be decoded"),
    "truncated header": (lambda folder: encoded(picture())[:20], "no image that can be read"),
    "an address": (lambda folder: "https://example.org/cat.png", "not fetched"),
    "an address of a file": (lambda folder: "file:///etc/passwd", "not fetched"),
    "no base64": (lambda folder: "data:image/png;base64,!!", "no base64"),
    "a plain data url": (lambda folder: "data:image/svg+xml,<svg/>", "without base64"),
    "a number": (lambda folder: 3, "is a int"),
    "a device": (lambda folder: "/dev/zero", "is no file"),
    "a name with NUL": (lambda folder: "a\0b", "cannot be read|is no file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused(name: str, llm: hal.LLM, tmp_path: Path) -> None:
    make, message = BAD[name]
    with pytest.raises(BatchError, match=message):
        llm.chat(asking(make(tmp_path)), max_new_tokens=1)


def black_png(side: int) -> bytes:
    """Return a small PNG of many black pixels."""
    stream = zlib.compressobj(9)
    rows = [stream.compress(bytes(1 + 3 * side)) for _ in range(side)]
    return png_header(side, side).replace(
        png_chunk(b"IDAT", zlib.compress(b"")), png_chunk(b"IDAT", b"".join(rows) + stream.flush())
    )


def test_bombs_take_no_memory(llm: hal.LLM) -> None:
    """A small file that would decode to 243 MB, and one that says 1.2 GB and has no pixels."""
    import resource

    bombs = black_png(9_000), png_header(20_000, 20_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for each in bombs:
        assert len(each) < 1 << 20
        with pytest.raises(BatchError, match=r"too large|pixels; the limit"):
            llm.chat(asking(each), max_new_tokens=1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_an_image_of_one_pixel_is_read_and_a_strip_is_refused(llm: hal.LLM) -> None:
    assert len(llm.chat(asking(picture(1, 1)), max_new_tokens=2, ignore_eos=True)[0].token_ids) == 2
    with pytest.raises(BatchError, match="2000 x 1 pixels cannot be prepared"):
        llm.chat(asking(picture(2000, 1)), max_new_tokens=1)


def filming(*frames: Any, **given: Any) -> list[dict[str, Any]]:
    part = {"type": "video", "video": [*frames], **given}
    return [{"role": "user", "content": [part, {"type": "text", "text": "what is this"}]}]


def test_a_video_of_no_use(llm: hal.LLM) -> None:
    one, two = picture(23, 17), picture(17, 23)
    for messages, problem in (
        (filming(fps=1), "the video of message 0 has 0 frames of no size"),
        (filming(one, two, fps=1), "the video of message 0 has 2 frames of 17 x 23, 23 x 17"),
        (filming(one, fps=0), "the video of message 0 has fps = 0"),
        (filming(one), "the video of message 0 has fps = None"),
        (filming(one, b"text", fps=1), "frame 1 of the video of message 0 is no image"),
    ):
        with pytest.raises(BatchError, match=problem):
            llm.chat(messages, max_new_tokens=1)


@pytest.mark.skipif(installed("torchvision"), reason="torchvision is installed")
def test_a_video_without_torchvision(llm: hal.LLM) -> None:
    with pytest.raises(ConfigError, match="transformers' processors of videos need torchvision"):
        llm.chat(filming(picture(), picture(), fps=1), max_new_tokens=1)


@pytest.mark.skipif(not installed("torchvision"), reason="transformers prepares videos with torchvision")
@pytest.mark.shows("videos", "hal.LLM")
def test_a_conversation_about_a_video(checkpoint: tuple[Any, Path], llm: hal.LLM) -> None:
    """The prompt has the time before each pair of frames, and the last frame twice if their number is odd."""
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    frames = [picture(24, 16, seed) for seed in range(3)]
    (found,) = llm.chat(filming(*frames, fps=2), max_new_tokens=5, temperature=0.0, ignore_eos=True)
    model, path = checkpoint
    made = AutoVideoProcessor.from_pretrained(path)(videos=[frames], return_tensors="pt", do_sample_frames=False)
    grid = tuple(made["video_grid_thw"][0].tolist())
    item = EncoderItem("video", made["pixel_values_videos"], grid, b"")
    # Two words that the tokenizer lacks, of <0.2 seconds>, before each.
    frame = [89, 89, START_ID, *[VIDEO_ID] * (grid[1] * grid[2] // 4), END_ID]
    prompt = [0, START_ID, *frame * grid[0], END_ID, *map(WORDS.index, ("what", "is", "this")), 1]
    known = list(prompt)
    for _ in range(5):
        known.append(int(their_logits(model, Story(known, [item], len(known)))[-1].argmax()))
    assert (grid[0], list(found.token_ids)) == (2, known[len(prompt) :])


@pytest.fixture
def film(tmp_path: Path) -> Path:
    """A file of 12 frames, 4 a second, each of another grey."""
    return filmed(tmp_path / "film.mp4", 12)


def filmed(path: Path, frames: int) -> Path:
    """Write a file of frames, 4 a second, each of another grey."""
    av = pytest.importorskip("av", reason="hal reads files of videos with av, of the extra vision")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
        for index in range(frames):
            frame = av.VideoFrame.from_image(Image.new("RGB", (24, 16), (240 * index // frames,) * 3))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def with_video_processor(checkpoint: Path, kind: str, folder: Path) -> Path:
    """Copy a checkpoint, with a processor of videos."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "preprocessor_config.json").read_text())
    del config["image_processor_type"]
    config["video_processor_type"] = f"{kind}VideoProcessor"
    (folder / "video_preprocessor_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.skipif(not installed("torchvision"), reason="transformers prepares videos with torchvision")
@pytest.mark.parametrize("fps", [None, 1])
@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen3VL"])
def test_a_file_of_a_video_is_read_as_by_transformers(
    kind: str, fps: int | None, checkpoint: tuple[Any, Path], film: Path
) -> None:
    """The same frames are chosen, and the same pixels reach the encoder. Qwen2VL takes all, unless it is asked."""
    import functools

    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.video_utils import load_video

    from hal.generation.llm.processor import open_processor

    folder = with_video_processor(checkpoint[1], kind, film.parent / "checkpoint")
    processor = AutoVideoProcessor.from_pretrained(folder)
    assert type(processor).__name__ == f"{kind}VideoProcessor"
    choose = functools.partial(processor.sample_frames, **({} if fps is None else {"fps": fps}))
    if kind == "Qwen2VL" and fps is None:
        choose = lambda metadata: torch.arange(metadata.total_num_frames)  # noqa: E731
    frames, metadata = load_video(str(film), backend="pyav", sample_indices_fn=choose)
    theirs = processor(videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt")
    (item,) = open_processor(hal.Checkpoint.open(folder)).items([read_video(film, fps, "the video")])
    assert list(item.grid) == theirs["video_grid_thw"][0].tolist()
    assert torch.equal(item.values, theirs["pixel_values_videos"])
    assert (len(item.times), item.times[0]) == (item.grid[0], metadata.frames_indices[:2].sum() / 2 / 4)


SAMPLINGS: list[dict[str, Any]] = [{}, *({"fps": each} for each in (0.3, 1, 3.3, 60))]
SAMPLINGS += [{"num_frames": each} for each in (1, 2, 5, 14, 60)]


@pytest.mark.skipif(not installed("torchvision"), reason="transformers prepares videos with torchvision")
@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen3VL"])
def test_frames_are_chosen_as_by_the_processor(kind: str, checkpoint: tuple[Any, Path], tmp_path: Path) -> None:
    """Qwen2.5-VL has Qwen2VL's processor, and Qwen3.5 Qwen3VL's. What they cannot choose, hal can, or refuses.

    Their failures are frames past the end, no frame at all, and fewer than a patch has.
    """
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    from hal.generation.llm.processor import open_processor

    folder = with_video_processor(checkpoint[1], kind, tmp_path / "made")
    processor, preparation = AutoVideoProcessor.from_pretrained(folder), open_processor(hal.Checkpoint.open(folder))
    asked = [(total, rate, each) for total in (1, 2, 17, 34, 53) for rate in (4, 29.97) for each in SAMPLINGS]
    failed = 0
    for total, rate, options in asked:
        frames = torch.randint(0, 256, (total, 8, 8, 3), dtype=torch.uint8)
        given = {"fps": options.get("fps"), "num_frames": options.get("num_frames")} if options else {}
        try:
            theirs = processor(
                videos=[frames.permute(0, 3, 1, 2)],
                video_metadata=[{"total_num_frames": total, "fps": rate, "frames_indices": [*range(total)]}],
                do_sample_frames=bool(options) or processor.do_sample_frames,
                return_metadata=True,
                return_tensors="pt",
                **given,
            )
        except Exception:
            theirs, failed = None, failed + 1
        video = Video(frames, rate, tuple(range(total)), total, sampled=False)
        if theirs is None and options.get("num_frames", 0) > total:
            with pytest.raises(BatchError, match="of which the processor cannot choose"):
                preparation.items([video], {"video": options})
            continue
        (item,) = preparation.items([video], {"video": options})
        assert item.values.shape[0] == item.grid[0] * item.grid[1] * item.grid[2]
        if theirs is not None:
            assert torch.equal(item.values, theirs["pixel_values_videos"]), (total, rate, options)
            assert list(item.grid) == theirs["video_grid_thw"][0].tolist()
            places = torch.as_tensor(theirs["video_metadata"][0].frames_indices).tolist()
            assert item.times[0] == (places[0] + places[min(1, len(places) - 1)]) / 2 / rate
    assert 0 < failed < len(asked) / 2


def test_parts_and_placeholders_that_do_not_fit(llm: hal.LLM) -> None:
    with pytest.raises(BatchError, match="has a part"):
        llm.chat([{"role": "user", "content": [{"type": "audio", "audio": b""}]}], max_new_tokens=1)
    with pytest.raises(BatchError, match="has a part"):
        llm.chat([{"role": "user", "content": [{"type": "image"}]}], max_new_tokens=1)
    with pytest.raises(BatchError, match="placeholders for 2 images or videos, and 1 are given"):
        llm.chat(asking(picture(), text="what <image>"), max_new_tokens=1)
    with pytest.raises(BatchError, match="placeholders for images or videos from token"):
        llm.generate("what <image>", max_new_tokens=1)
    with pytest.raises(BatchError, match="to score or embed has images"):
        llm.embed(llm.chat_prompt(asking(picture())))


def test_transparent_pixels_are_white() -> None:
    for mode, colour in (("RGBA", (10, 20, 30, 0)), ("RGBa", (0, 0, 0, 0)), ("LA", (9, 0)), ("La", (0, 0))):
        assert read_image(Image.new(mode, (3, 2), colour), mode).getpixel((0, 0)) == (255, 255, 255)
    assert read_image(encoded(Image.new("L", (3, 2), 7)), "image").getpixel((0, 0)) == (7, 7, 7)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP"])
def test_images_are_turned_once_as_their_exif_says(kind: str, orientation: int) -> None:
    """From bytes, a data URL, an image of PIL that is loaded or not, and as a frame. BMP has no EXIF."""
    from PIL.ImageOps import exif_transpose

    tag = Image.Exif()
    tag[0x0112] = orientation
    content = encoded(picture(), kind, exif=tag)
    expected = numpy.asarray(exif_transpose(Image.open(io.BytesIO(content))))
    assert expected.shape == ((23, 17, 3) if orientation > 4 and kind != "BMP" else (17, 23, 3))
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"
    loaded = Image.open(io.BytesIO(content))
    loaded.load()
    for given in (content, url, Image.open(io.BytesIO(content)), loaded, loaded):
        found = read_image(given, "image")
        assert numpy.array_equal(found, expected)
        assert numpy.array_equal(read_image(found, "image"), expected), "not again"
    assert numpy.array_equal(read_video([content], 1, "video").frames[0], expected)


def test_damaged_exif_turns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    image = picture()
    image.info["exif"] = b"Exif\0\0no TIFF"
    assert numpy.array_equal(read_image(image, "image 3"), image)
    assert "the EXIF of image 3 cannot be read, so it is not turned" in caplog.text


VALUES = numpy.array([[0, 128, 129, 255, 32768, 65406, 65407, 65535]], numpy.uint16)
GREYS = [0, 0, 1, 1, 128, 254, 255, 255]


def twelve_bits() -> bytes:
    """Return a TIFF with the values 0, 2048 and 4095 of 12 bits, and a fourth."""
    tags = {256: 4, 257: 1, 258: 12, 259: 1, 262: 1, 273: 128, 277: 1, 278: 1, 279: 6}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return head.ljust(128, b"\0") + bytes.fromhex("000800fff000")


@pytest.mark.parametrize(
    ("image", "greys"),
    [
        (encoded(Image.fromarray(VALUES)), GREYS),
        (encoded(Image.fromarray(VALUES), "TIFF"), GREYS),
        (Image.fromarray(VALUES.astype(">u2")), GREYS),
        (encoded(Image.fromarray(VALUES), transparency=129), [0, 0, 255, 1, *GREYS[4:]]),
        (twelve_bits(), [0, 128, 255, 0]),
    ],
    ids=["PNG", "TIFF", "big endian", "a transparent grey", "12 bits"],
)
def test_sixteen_bits_are_scaled_to_eight(image: Any, greys: list[int]) -> None:
    assert numpy.asarray(read_image(image, "image"))[0].tolist() == [[each] * 3 for each in greys]


@pytest.mark.parametrize("kind", [numpy.float32, numpy.int32])
def test_values_without_a_range_are_refused(kind: Any) -> None:
    image = Image.fromarray(VALUES.astype(kind))
    for given in (image, encoded(image, "TIFF")):
        with pytest.raises(BatchError, match="and does not say which is white"):
            read_image(given, "image")


def test_a_checkpoint_without_processor_and_a_model_of_text(
    checkpoint: tuple[Any, Path], llm: hal.LLM, trained: Path
) -> None:
    from hal.generation.llm.processor import open_processor, prompt_with

    opened = hal.Checkpoint.open(trained)
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        open_processor(opened)
    backend = hal.open({"backend": "cpu"})
    text = hal.load_model(trained, backend)
    video = Video(numpy.zeros((2, 8, 8, 3), numpy.uint8), 1.0, (0, 1), 2)
    for media, given in (([picture()], "image"), ([video], "video"), ([video, picture()], "image and video")):
        with pytest.raises(ModelError, match=f"reads text alone; given: {given}\n.*leave the {given} out"):
            prompt_with(text, open_processor(llm.checkpoint), [1, 2], media)
    item = EncoderItem("video", torch.zeros(4, 96), (1, 2, 2), b"")
    with pytest.raises(ModelError, match="reads text alone; given: video"):
        text.place([1, 2], [item])


def test_an_image_for_a_model_of_text_on_the_command_line(trained: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from hal.cli import main

    (tmp_path / "cat.png").write_bytes(encoded(picture()))
    options = ["generate", str(trained), "--backend", "cpu", "--prompt", "what is this", "--image"]
    result = CliRunner().invoke(main, [*options, str(tmp_path / "cat.png")])
    assert "reads text alone; given: image" in result.stderr, "not the template, which images would break"
    assert "leave the image out" in result.stderr
    options[-1] = "--video"
    result = CliRunner().invoke(main, [*options, str(tmp_path / "cat.png")])
    assert "reads text alone; given: video" in result.stderr
    result = CliRunner().invoke(main, [*options, str(tmp_path / "none.png")])
    assert "none.png' does not exist" in result.stderr


@pytest.mark.shows("images", "hal serve")
def test_an_image_in_the_api_of_openai(checkpoint: tuple[Any, Path], llm: hal.LLM) -> None:
    pytest.importorskip("starlette", reason="hal serve needs the extra serve")
    from helpers.api_server import ask, served

    image = picture(18, 26, 7)
    url = "data:image/jpeg;base64," + base64.b64encode(encoded(image, "JPEG")).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 5, "temperature": 0}
    (expected,) = llm.chat([{"role": "user", "content": parts}], max_new_tokens=5, temperature=0.0)
    with served(llm) as address:
        headers = {"Content_Type": "application/json"}
        status, answer, _ = ask(address, "POST", "/v1/chat/completions", json.dumps(body).encode(), **headers)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == expected.text


@pytest.mark.skipif(not installed("torchvision"), reason="transformers prepares videos with torchvision")
@pytest.mark.shows("videos", "hal serve")
def test_a_video_over_http(llm: hal.LLM, film: Path) -> None:
    """A file, and frames, as vLLM's clients send them; and a file that is cut."""
    pytest.importorskip("starlette", reason="hal serve needs the extra serve")
    from helpers.api_server import ask, served

    content = film.read_bytes()
    frames = ",".join(base64.b64encode(encoded(picture(24, 16, seed), "JPEG")).decode() for seed in range(4))
    urls = [f"data:video/mp4;base64,{base64.b64encode(each).decode()}" for each in (content, content[:-300])]
    with served(llm) as address:
        for url in (urls[0], f"data:video/jpeg;base64,{frames}", urls[1]):
            parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "what is this"}]
            messages = [{"role": "user", "content": parts}]
            body = {"model": "tiny", "messages": messages, "max_tokens": 5, "temperature": 0}
            headers = {"Content_Type": "application/json"}
            status, answer, _ = ask(address, "POST", "/v1/chat/completions", json.dumps(body).encode(), **headers)
            if url == urls[1]:
                assert status == 400
                assert "the video of message 0 is no video that can be read" in answer["error"]["message"]
                continue
            (expected,) = llm.chat(messages, max_new_tokens=5, temperature=0.0)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, expected.text)


@pytest.mark.shows("videos", "hal serve")
def test_requests_are_answered_while_videos_are_read(
    checkpoint: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More videos than the server has threads for: texts and images do not wait for them."""
    pytest.importorskip("starlette", reason="hal serve needs the extra serve")
    from helpers.api_server import ask, served

    from hal.generation.llm import processor
    from hal.serve.server_state import MEDIA_THREADS

    reading, go_on = threading.Semaphore(0), threading.Event()

    class Slow(processor.Preparation):
        def __init__(self, real: processor.Preparation) -> None:
            self.real = real

        def items(self, media: Any, options: Any = MappingProxyType({})) -> list[EncoderItem]:
            if isinstance(media[0], Video):
                reading.release()
                assert go_on.wait(60)
                raise BatchError("the video was read", "")
            return self.real.items(media, options)

    opened = processor.open_processor
    monkeypatch.setattr(processor, "open_processor", lambda of: Slow(opened(of)))
    url = "data:image/jpeg;base64," + base64.b64encode(encoded(picture(), "JPEG")).decode()
    text = {"type": "text", "text": "what is this"}
    image = {"type": "image_url", "image_url": {"url": url}}
    video = {"type": "video_url", "video_url": {"url": url.replace("image", "video")}}

    def said(*parts: Any) -> int:
        body = {"model": "tiny", "messages": [{"role": "user", "content": [*parts, text]}], "max_tokens": 2}
        headers = {"Content_Type": "application/json"}
        status, answer, _ = ask(address, "POST", "/v1/chat/completions", json.dumps(body).encode(), **headers)
        assert (status == 400) == ("the video was read" in str(answer)), answer
        return status

    count = 4 * MEDIA_THREADS + (os.cpu_count() or 1)  # more than all threads of asyncio
    with (
        hal.LLM(checkpoint[1], backend="cpu", dtype="float32", max_length=256, max_sequences=4) as own,
        served(own) as address,
        ThreadPoolExecutor(count) as clients,
    ):
        videos = [clients.submit(said, video) for _ in range(count)]
        try:
            for _ in range(MEDIA_THREADS):
                assert reading.acquire(timeout=60)
            assert (said(), said(image)) == (200, 200)
            assert not any(each.done() for each in videos)
        finally:
            go_on.set()
        assert [each.result() for each in videos] == [400] * count


def test_a_conversation_in_the_terminal(checkpoint: tuple[Any, Path], llm: hal.LLM, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from hal.cli import main

    (tmp_path / "cat.png").write_bytes(encoded(picture(23, 17, 8)))
    lines = f"/image {tmp_path / 'none.png'}\n/image {tmp_path / 'cat.png'}\nwhat is this\n/exit\n"
    options = [
        "chat",
        str(checkpoint[1]),
        *["--backend", "cpu", "--dtype", "float32", "--greedy", "--max-new-tokens", "4"],
    ]
    result = CliRunner().invoke(main, options, input=lines)
    assert result.exit_code == 0, result.stderr
    assert f"there is no file {tmp_path / 'none.png'}" in result.stderr
    (expected,) = llm.chat(asking(tmp_path / "cat.png"), max_new_tokens=4, temperature=0.0)
    assert result.stdout == f"{expected.text}\n"


@pytest.mark.skipif(not installed("torchvision"), reason="transformers prepares videos with torchvision")
@pytest.mark.shows("videos", "the command")
def test_a_video_on_the_command_line(checkpoint: tuple[Any, Path], llm: hal.LLM, film: Path) -> None:
    from click.testing import CliRunner

    from hal.cli import main

    (film.parent / "cat.png").write_bytes(encoded(picture()))
    options = ["generate", str(checkpoint[1]), "--backend", "cpu", "--dtype", "float32", "--greedy", "--json"]
    media = ["--video", str(film), "--image", str(film.parent / "cat.png")]
    result = CliRunner().invoke(main, [*options, *media, "--prompt", "what is this", "--max-new-tokens", "4"])
    assert result.exit_code == 0, result.stderr
    parts = [{"type": "image", "image": film.parent / "cat.png"}, {"type": "video", "video": film}]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is this"}]}]
    (expected,) = llm.chat(messages, max_new_tokens=4, temperature=0.0)
    assert json.loads(result.stdout)["token_ids"] == list(expected.token_ids)


def ask(checkpoint: Path, image: Any, folder: Path, hidden: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `hal generate` with an image, in processes that cannot import the package ``hidden``."""
    (folder / "cat.png").write_bytes(encoded(image))
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules['{hidden}'] = None\n")
    command = [sys.executable, "-m", "hal", "generate", str(checkpoint), "--image", str(folder / "cat.png")]
    command += ["--prompt", "what is this", "--greedy", "--max-new-tokens", "5", "--json", "--backend", "cpu"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(folder)}
    return subprocess.run(
        [*command, "--dtype", "float32", *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


@pytest.mark.shows("images", "the command")
@thorough(PROCESSES)
@thorough(EXHAUSTIVE, r"\[one")
@pytest.mark.parametrize("options", [(), ("--tensor-parallel", "2")], ids=["one", "two ranks"])
def test_generate_with_an_image_on_the_command_line(
    options: tuple[str, ...], checkpoint: tuple[Any, Path], tmp_path: Path
) -> None:
    image = picture(23, 17, 6)
    # transformers imports torch_npu if it is installed, and without CANN the import fails.
    found = ask(checkpoint[1], image, tmp_path, "torch_npu", *options)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["token_ids"] == their_answer(checkpoint, [image], ["what", "is", "this"])


@thorough(PROCESSES)
def test_without_transformers_the_extra_is_named(checkpoint: tuple[Any, Path], tmp_path: Path) -> None:
    found = ask(checkpoint[1], picture(23, 17, 6), tmp_path, "transformers")
    assert found.returncode == 2
    assert "an image needs transformers, which cannot be imported" in found.stderr
    assert "pip install transformers (or 'torch-hal[vision]')\n" in found.stderr
