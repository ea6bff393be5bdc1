"""Images as callers give them, read with bounded memory."""

from __future__ import annotations

import base64
import binascii
import io
import logging
import warnings
from pathlib import Path
from typing import Any

from hal.config.optional_libraries import need
from hal.errors import BatchError

MOST_PIXELS = 1 << 26
"""The most pixels of an image, and of all frames of a video. Its decoded form takes three or four bytes for each."""
MOST_BYTES = 1 << 28
"""The most bytes of a file."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""The formats that are decoded. Others, such as SVG, are refused."""
ORIENTATION = 0x0112
"""The tag of EXIF that says how a camera was held."""
BITS_PER_SAMPLE = 0x0102
"""The tag of TIFF that says how many bits a channel has."""
_REMEDY = f"give an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"

log = logging.getLogger("hal.generation")


def read_image(given: Any, where: str) -> Any:
    """Return an image of PIL, in RGB, turned as its EXIF says.

    Of an animation, it is the first frame, or the one that an image of PIL is at.

    Args:
        given: a path, the bytes of a file, a data URL, or an image of PIL. Addresses in a network are not fetched.
        where: the subject of an error, such as ``image 0``.

    Raises:
        BatchError: it cannot be read, is in another format, has values whose range is not known, or is too large.
        ConfigError: the package pillow is not installed.
    """
    library = need("PIL.Image", "vision", "an image")
    if isinstance(given, library.Image):
        return _decoded(given, where, library)
    content = read_content(given, where, "an image", ", bytes, a data URL or an image of PIL")
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
        image, orientation = _in_eight_bits(image, where), _orientation(image, where)
        if image.mode == "La":
            image = image.convert("LA")
        if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = library.new("RGBA", image.size, "white")
            image = library.alpha_composite(white, image)
        image = image.convert("RGB")
        image.info.clear()  # exif_transpose writes EXIF anew, which fails for some that can be read.
        image.getexif()[ORIENTATION] = orientation
        need("PIL.ImageOps", "vision", "an image").exif_transpose(image, in_place=True)
        return image
    except (OSError, ValueError, SyntaxError, MemoryError) as error:
        raise BatchError(f"{where} cannot be decoded: {error!s:.200}", "check that the file is complete") from None


def _orientation(image: Any, where: str) -> Any:
    """Return the orientation that remains. Pillow turns TIFF as it loads it, and removes the tag."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception as error:  # Pillow raises anything for damaged EXIF.
        log.warning("the EXIF of %s cannot be read, so it is not turned: %s", where, error)
        return 1


def _in_eight_bits(image: Any, where: str) -> Any:
    """Return an image of at most 8 bits a channel. Pillow would cut larger values to white."""
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):  # that of a PNG in Pillow 10
        kind = "floats" if image.mode == "F" else "integers of 32 bits"
        raise BatchError(
            f"{where} has {kind}, and does not say which is white",
            "scale it to 8 bits, as by PIL.Image.fromarray((array / white * 255).astype('uint8'))",
        )
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    bits = getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))[0]
    most = (1 << bits) - 1
    table = [min(255, (255 * value + most // 2) // most) for value in range(1 << 16)]
    if isinstance(transparent := image.info.get("transparency"), int):
        table[transparent] = 255
    image = image.convert("I").point(table, "L")
    image.info.pop("transparency", None)
    return image


def read_content(given: Any, where: str, kind: str, others: str = ", bytes or a data URL") -> bytes:
    """Return the bytes of a file.

    Args:
        given: a path, the bytes, or a data URL. Addresses in a network are not fetched.
        where: the subject of an error.
        kind: what it should be, with its article.
        others: what may be given in place of a path, for an error.

    Raises:
        BatchError: it is none of these, cannot be read, or is too large.
    """
    content = _content(given, where, kind, others)
    if len(content) > MOST_BYTES:
        raise BatchError(f"{where} has {len(content) >> 20} MiB, more than {MOST_BYTES >> 20}", "give a smaller file")
    return content


def _content(given: Any, where: str, kind: str, others: str) -> bytes:
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str) and given.startswith("data:"):
        head, comma, text = given.partition(",")
        if not comma or not head.endswith(";base64"):
            raise BatchError(f"{where} is a data URL without base64: {head!r:.60}", f"encode {kind} in base64")
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BatchError(f"{where} is no base64: {error}", f"encode {kind} in base64") from None
    if isinstance(given, str) and given.partition("://")[0] in ("http", "https", "ftp", "file"):
        raise BatchError(
            f"{where} is the address {given!r:.60}, which is not fetched", "download it, and give its path"
        )
    if not isinstance(given, str | Path):
        raise BatchError(f"{where} is a {type(given).__name__}", f"give a path{others}")
    path = Path(given)
    try:
        if not path.is_file():
            raise BatchError(f"{where} is {str(path)!r:.200}, which is no file", f"give the path of {kind}")
        if path.stat().st_size > MOST_BYTES:
            raise BatchError(f"{where} has more than {MOST_BYTES >> 20} MiB", "give a smaller file")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise BatchError(f"{where} cannot be read: {error}", "check the path") from None
