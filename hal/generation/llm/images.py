"""Images as callers give them, read with bounded memory."""

from __future__ import annotations

import base64
import binascii
import io
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
_REMEDY = f"give an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


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
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = library.new("RGBA", image.size, "white")
            return library.alpha_composite(white, image).convert("RGB")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, MemoryError) as error:
        raise BatchError(f"{where} cannot be decoded: {error!s:.200}", "check that the file is complete") from None


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
