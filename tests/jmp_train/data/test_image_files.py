import io
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine_limits import memory_limited_to
from PIL import EpsImagePlugin, Image

from jmp_train.data.image_files import read_image

pytestmark = pytest.mark.quick

RGB = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
WANTED = ("BMP", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")  # an MPO is a JPEG with more behind it


def png(width: int, height: int, bits: int, color: int, rows: bytes, extra: bytes = b"") -> bytes:
    """Returns a PNG, written from the format's description."""
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + extra
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def tiff(body: bytes, tags: Mapping[int, int | tuple[int, int, int]], order: str = "<") -> bytes:
    """Returns a TIFF of one strip or tile, written from the format's description.

    A tag's value is a 32-bit number, or (type, count, value or offset).
    """
    values = {273: 8, 277: 1, 279: len(body), **tags}
    entries = b""
    for tag, value in sorted(values.items()):
        kind, count, number = value if isinstance(value, tuple) else (4, 1, value)
        entries += struct.pack(f"{order}HHII", tag, kind, count, number)
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(body))
    return start + body + struct.pack(f"{order}H", len(values)) + entries + bytes(4)


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def read(path: Path, content: bytes) -> np.ndarray:
    path.write_bytes(content)
    image = read_image(str(path))
    assert image.mode == "RGB"
    return np.asarray(image)


def fault(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} cannot be decoded as") as caught:
        read_image(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value).partition("as an image: ")[2]


@pytest.mark.parametrize("format", WANTED)
def test_what_a_file_holds_counts_and_not_its_name(tmp_path: Path, format: str) -> None:
    lossless: dict[str, Any] = {"WEBP": {"lossless": True}}.get(format, {})
    result = read(tmp_path / "0.jpg", saved(Image.fromarray(RGB), format, **lossless))
    lossy = format in ("JPEG", "MPO")
    expected = np.asarray(Image.open(tmp_path / "0.jpg").convert("RGB")) if lossy else RGB
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("format", ["GIF", "ICO", "TGA", "PCX", "EPS", "PDF", "SGI", "DDS", "DIB"])
def test_other_formats_of_pillows_are_refused(tmp_path: Path, format: str) -> None:
    content = saved(Image.fromarray(RGB), format)
    message = f"it is not a JPEG, PNG, WebP, BMP, PPM or TIFF file: it starts with {content[:16]!r}"
    assert fault(tmp_path / "0.png", content) == message


def test_postscript_starts_no_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ghostscript, ran, image = (tmp_path / name for name in ("gs", "ran", "0.jpg"))
    ghostscript.write_text(f"#!/bin/sh\necho $0 > {ran}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # so that it is looked for again
    image.write_bytes(saved(Image.fromarray(RGB), "EPS"))
    with Image.open(image) as opened, pytest.raises(OSError):
        opened.load()
    assert ran.exists()  # so much for opening all
    ran.unlink()
    assert fault(image, image.read_bytes()).startswith(
        "it is not a JPEG, PNG, WebP, BMP, PPM or TIFF file: it starts with b'%!PS-Adobe"
    )
    assert not ran.exists()


def ramp(bits: int) -> np.ndarray:
    """Returns values of all sizes, the ends included, [32, 64]."""
    return np.linspace(0, 2**bits - 1, 32 * 64).astype(np.uint16).reshape(32, 64)


def rows_of(samples: np.ndarray, order: str) -> bytes:
    return samples.astype(f"{order}u2").tobytes()


def pairs_of_12_bits(samples: np.ndarray) -> bytes:
    first, second = (samples.reshape(-1, 2).T).astype(np.uint16)
    parts = (first >> 4, (first & 15) << 4 | second >> 8, second & 255)
    return np.stack(parts, axis=1).astype(np.uint8).tobytes()


GRAY_TIFF = {256: 64, 257: 32, 259: 1, 262: 1, 278: 32}
PNG_ROWS = b"".join(b"\0" + rows_of(row, ">") for row in ramp(16))


GRAYS = {
    "png": (16, png(64, 32, 16, 0, PNG_ROWS)),
    "pgm": (16, b"P5 64 32 65535 " + rows_of(ramp(16), ">")),
    "text": (16, b"P2 64 32 65535 " + b" ".join(b"%d" % number for number in ramp(16).flat)),
    "tiff": (16, tiff(rows_of(ramp(16), "<"), {**GRAY_TIFF, 258: 16})),
    "tiff_big_endian": (16, tiff(rows_of(ramp(16), ">"), {**GRAY_TIFF, 258: 16}, ">")),
    "tiff_12": (12, tiff(pairs_of_12_bits(ramp(12)), {**GRAY_TIFF, 258: 12})),
    "pgm_12": (12, b"P5 64 32 4095 " + rows_of(ramp(12), ">")),
}


@pytest.mark.parametrize("name", GRAYS)
def test_gray_of_more_than_8_bits_is_scaled(tmp_path: Path, name: str) -> None:
    bits, content = GRAYS[name]
    exact = ramp(bits).astype(np.float64) * 255 / (2**bits - 1)
    result = read(tmp_path / "0.png", content)
    # 4,095 levels are made 65,535 before: to the nearest, and then to the nearest again.
    tolerance = 0.5 + (1 / 257 if name == "pgm_12" else 0)
    assert np.abs(result - exact[..., None]).max() <= tolerance
    assert (result[0, 0, 0], result[-1, -1, 0]) == (0, 255)


@pytest.mark.parametrize(("color", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_channels_of_16_bits_keep_their_upper_ones(tmp_path: Path, color: int, channels: int) -> None:
    samples = np.random.default_rng(0).integers(0, 2**16, (16, 16, channels))
    rows = b"".join(b"\0" + rows_of(row, ">") for row in samples)
    result = read(tmp_path / "0.png", png(16, 16, 16, color, rows))
    exact = samples[..., :3] / 257 if channels > 2 else samples[..., :1] / 257
    assert np.abs(result - exact).max() < 1


def test_colors_of_other_modes(tmp_path: Path) -> None:
    path, image = tmp_path / "0.png", Image.fromarray(RGB)
    gray = image.convert("L")
    alpha = Image.fromarray(RGB[..., 0])  # some of it transparent, which does not count
    rgba, gray_alpha = image.copy(), gray.copy()
    rgba.putalpha(alpha)
    gray_alpha.putalpha(alpha)
    as_gray = np.repeat(np.asarray(gray)[..., None], 3, axis=2)
    np.testing.assert_array_equal(read(path, saved(rgba, "PNG")), RGB)
    np.testing.assert_array_equal(read(path, saved(gray_alpha, "PNG")), as_gray)
    np.testing.assert_array_equal(read(path, saved(gray, "PNG", transparency=7)), as_gray)
    np.testing.assert_array_equal(read(path, saved(image, "PNG", transparency=(1, 2, 3))), RGB)
    palette = image.quantize(16)
    colors = np.array(palette.getpalette()).reshape(-1, 3)[np.asarray(palette)]
    for transparency in (3, bytes(range(0, 256, 16))):  # of one color, or of each
        content = saved(palette, "PNG", transparency=transparency)
        np.testing.assert_array_equal(read(path, content), colors)
    body = np.stack([np.asarray(palette), RGB[..., 0]], axis=2).tobytes()
    table = np.zeros((3, 256), "<u2")
    table[:, :16] = np.array(palette.getpalette()).reshape(-1, 3).T * 257
    tags = {256: 24, 257: 20, 258: (3, 2, 8 << 16 | 8), 259: 1, 262: 3, 277: 2, 278: 20, 338: 2}
    content = tiff(body + table.tobytes(), {**tags, 279: len(body), 320: (3, 768, 8 + len(body))})
    np.testing.assert_array_equal(read(path, content), colors)
    bits = image.convert("1")
    as_bits = 255 * np.repeat(np.asarray(bits)[..., None], 3, axis=2).astype(np.uint8)
    for format in ("PNG", "BMP", "PPM", "TIFF"):
        np.testing.assert_array_equal(read(path, saved(bits, format)), as_bits)


def test_cyan_magenta_yellow_and_black_become_colors(tmp_path: Path) -> None:
    inks = np.random.default_rng(0).integers(0, 256, (20, 24, 4), np.uint8)
    exact = (255.0 - inks[..., :3]) * (255.0 - inks[..., 3:]) / 255
    image = Image.fromarray(inks, "CMYK")
    assert np.abs(read(tmp_path / "0.tif", saved(image, "TIFF")) - exact).max() <= 1
    even = Image.new("CMYK", (24, 20), (200, 100, 50, 25))  # which JPEG keeps, but for its rounding
    exact = (255.0 - np.array([200, 100, 50])) * (255.0 - 25) / 255
    assert np.abs(read(tmp_path / "0.jpg", saved(even, "JPEG", quality=100)) - exact).max() <= 3


def test_a_rotated_image_is_read_as_it_is_stored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, which torchvision does not
    content = saved(Image.fromarray(RGB), "PNG", exif=exif)
    np.testing.assert_array_equal(read(tmp_path / "0.png", content), RGB)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixel_values_of_no_known_range_are_refused(tmp_path: Path, mode: str) -> None:
    content = saved(Image.new(mode, (8, 8), 300), "TIFF")
    expected = f"its pixel values (mode {mode} in pillow) have no known range"
    assert fault(tmp_path / "0.tif", content) == expected


def canvas(side: int) -> bytes:
    """Returns a WebP that has a header only."""
    side_bytes = (side - 1).to_bytes(3, "little")
    chunks = b"WEBPVP8X" + struct.pack("<I", 10) + bytes([2, 0, 0, 0]) + 2 * side_bytes
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def scans(side: int, count: int) -> bytes:
    """Returns a progressive JPEG, which has one scan many times."""
    content = saved(Image.new("L", (side, side), 100), "JPEG", progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + count * last + content[-2:]


ZEROS = zlib.compress(bytes(2**26), 9)
TILES = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 322: 30_000, 323: 30_000, 324: 8, 325: len(ZEROS)}
TAGS = dict.fromkeys(range(40000, 40400), (7, 2**20, 8))  # each of them the same megabyte
TEXTS = chunk(b"zTXt", b"a\0\0" + ZEROS)
PROFILE = chunk(b"iCCP", b"a\0\0" + ZEROS)
LONG_CHUNK = png(2, 2, 8, 0, bytes(6)).replace(b"\0\0\0\x0bIDAT", b"\x7f\xff\xff\xffIDAT")


GREEDY = {
    "above_the_bound": (png(9460, 9460, 1, 0, bytes(1184) * 9460), "it has 9460 x 9460 pixels, more than max_pix"),
    "far_above": (png(20_000, 20_000, 1, 0, bytes(10)), "it has 20000 x 20000 pixels, more than max_pixels"),
    "sides": (png(2**31 - 1, 2**31 - 1, 8, 6, b""), "it has 2147483647 x 2147483647 pixels, more than "),
    "ppm": (b"P6 60000 60000 255 ", "it has 60000 x 60000 pixels, more than max_pixels=89478485"),
    "tiles": (tiff(ZEROS, TILES), "its tiles have 30000 x 30000 pixels, more than max_pixels=89478485"),
    "tags": (tiff(bytes(2**20), {256: 64, 257: 64, 258: 8, 259: 1, 262: 1, **TAGS}), ""),
    "canvas": (canvas(2**16 - 1), ""),
    "text": (png(2, 2, 8, 0, bytes(6), TEXTS), "Decompressed data too large"),
    "profile": (png(2, 2, 8, 0, bytes(6), PROFILE), "Decompressed data too large"),
    "scans": (scans(2000, 5000), "it has 5006 scans of 2000 x 2000 pixels, far too many"),
    "comments": (b"P2\n64 64\n255\n" + 500_000 * b"#\n", "not enough image data"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", GREEDY)
def test_what_would_take_much_memory_or_time_is_refused(tmp_path: Path, name: str) -> None:
    content, message = GREEDY[name]
    with memory_limited_to(2**28):
        assert message in fault(tmp_path / "0.png", content)


def test_a_chunk_takes_no_more_memory_than_the_file_has(tmp_path: Path) -> None:
    with memory_limited_to(2**28):
        assert read(tmp_path / "0.png", LONG_CHUNK).shape == (2, 2, 3)
