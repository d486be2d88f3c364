"""Decodes image files of the formats in image folders to 8 bits of red, green and blue.

The first bytes of a file select the decoder, and no other of pillow's decoders gets the file, because some, such as
that of PostScript, start programs.
"""

import errno
import io
import os
import re
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from jmp_train.extras import extra_packages
from jmp_train.policies.files import DamagedError, faults_named, open_plain

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

MAX_PIXELS = 89_478_485  # pillow's limit for a warning: 256 MiB at three bytes per pixel

# The largest size of a file: text takes 12 bytes per pixel, four channels of 16 bits 8; profiles and notes add to it.
_BYTES_PER_PIXEL, _FURTHER_BYTES = 16, 2**24
_SCANNED_PIXELS = 2**34  # of progressive JPEG, which has about ten scans: ten seconds
_COMMENT = rb"#[^\r\n]*[\r\n]?"  # of a PPM file


def read_image(path: str, *, max_pixels: int = MAX_PIXELS) -> "Image":
    """Reads an image without transparency and unrotated, as torchvision does.

    Gray of 16 bits is divided by 257 and rounded. For colors of 16 bits, pillow takes the upper eight bits, a
    difference below one. Only the first of several images in a file is read.

    Args:
      path: the file, with any name.
      max_pixels: the largest image to read. A small file can hold a very large one.

    Returns:
      An image of pillow's in mode RGB.

    Raises:
      ValueError: the file is not a JPEG, PNG, WebP, BMP, PPM or TIFF, is damaged, missing or not a regular file, has
        more than `max_pixels` by its header, has more than 2**34 pixels in all scans of a progressive JPEG, or
        has pixel values without a known range: 32 bits, signed, or not integer. The message names it.
      OSError: the image does not fit into memory.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> file = Path(tempfile.mkdtemp()) / "dot.ppm"
      >>> _ = file.write_bytes(b"P6 1 1 255 " + bytes([10, 20, 30]))
      >>> read_image(str(file)).getpixel((0, 0))
      (10, 20, 30)
    """
    with faults_named(path):
        try:
            return _decoded(_content(path, max_pixels), max_pixels)
        except (MemoryError, ModuleNotFoundError, DamagedError):
            raise
        except Exception as error:  # of any class, because pillow's decoders detect damage in many places
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise
            fault = str(error) or repr(error)
            raise DamagedError(f"{path} cannot be decoded as an image: {fault}") from error


def _content(path: str, max_pixels: int) -> bytes:
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _BYTES_PER_PIXEL * max_pixels + _FURTHER_BYTES:
            raise ValueError(f"it has {size} bytes, too many for {max_pixels=}")
        return file.read()


def _decoded(content: bytes, max_pixels: int) -> "Image":
    image = _opened(content)
    _check_pixels(image, content, max_pixels)
    image.load()
    # Without transparency; otherwise pillow would look for a color that stands for it, and warn.
    image.info.pop("transparency", None)
    return _with_8_bits(image).convert("RGB")


def _opened(content: bytes) -> "ImageFile":
    """Returns an image with only its header read."""
    with extra_packages():
        from PIL import (
            BmpImagePlugin,
            JpegImagePlugin,
            PngImagePlugin,
            PpmImagePlugin,
            TiffImagePlugin,
            WebPImagePlugin,
        )

    # In memory, because from a file pillow allocates the size that a chunk claims.
    file = io.BytesIO(content)
    if content.startswith(b"\xff\xd8\xff"):
        return JpegImagePlugin.JpegImageFile(file)
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile(file)
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile(file)
    if content.startswith(b"BM"):
        return BmpImagePlugin.BmpImageFile(file)
    if content.startswith((b"II", b"MM")):
        return TiffImagePlugin.TiffImageFile(_ReadAFewTimes(content))
    if content.startswith((b"P4", b"P5", b"P6")):
        return PpmImagePlugin.PpmImageFile(file)
    if content.startswith((b"P1", b"P2", b"P3")):
        # These are text, and pillow copies the rest of it at each comment.
        return PpmImagePlugin.PpmImageFile(io.BytesIO(re.sub(_COMMENT, b"", content)))
    raise ValueError(f"it is not a JPEG, PNG, WebP, BMP, PPM or TIFF file: it starts with {content[:16]!r}")


class _ReadAFewTimes(io.BytesIO):
    """A file that limits how often its content is read, because all tags of a TIFF may refer to the same megabyte."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._bytes_left = 4 * len(content) + 2**20

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise OSError("its parts are together much larger than the file")
        return data


def _check_pixels(image: "ImageFile", content: bytes, max_pixels: int) -> None:
    """Raises ValueError before decoding if it would take too much memory or time."""
    with extra_packages():
        from PIL.TiffImagePlugin import TILELENGTH, TILEWIDTH, TiffImageFile

    width, height = image.size
    if width * height > max_pixels:
        raise ValueError(f"it has {width} x {height} pixels, more than {max_pixels=}")
    if isinstance(image, TiffImageFile) and TILEWIDTH in image.tag_v2:
        tile_width, tile_height = image.tag_v2[TILEWIDTH], image.tag_v2[TILELENGTH]
        if tile_width * tile_height > max_pixels:
            raise ValueError(f"its tiles have {tile_width} x {tile_height} pixels, more than {max_pixels=}")
    if image.info.get("progressive"):  # each scan visits all pixels
        scans = content.count(b"\xff\xda")
        if scans * width * height > _SCANNED_PIXELS:
            raise ValueError(f"it has {scans} scans of {width} x {height} pixels, far too many")


def _with_8_bits(image: "ImageFile") -> "Image":
    """Returns an image with channels of 8 bits; pillow's conversion would clip larger values."""
    if not image.mode.startswith(("I", "F")):
        return image
    with extra_packages():
        from PIL import Image
        from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile

    # pillow's 32-bit integers hold 16 bits for PNG and PPM; for TIFF they hold 32.
    tiff = isinstance(image, TiffImageFile)
    if not image.mode.startswith("I;16") and (tiff or image.mode != "I"):
        raise ValueError(f"its pixel values (mode {image.mode} in pillow) have no known range")
    bits = image.tag_v2[BITSPERSAMPLE][0] if tiff else 16  # or 12
    return Image.fromarray(_scaled_to_8_bits(bits)[np.asarray(image)])


@cache
def _scaled_to_8_bits(bits: int) -> np.ndarray:
    """Returns a table of 8-bit values for all integers of so many bits, uint8 [2**bits]."""
    largest = 2**bits - 1
    return np.rint(np.arange(largest + 1) * 255 / largest).astype(np.uint8)
