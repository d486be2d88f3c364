"""Reads damaged images and arrays under limits: `damaged_files.py FOLDER SEED COUNT`.

Prints JSON: how many files gave an array and how many an error that names them, what else happened, and how much
memory and time a file took. A file that caused something else, or that is never done, is left in the folder.
"""

import faulthandler
import gzip
import io
import json
import re
import resource
import struct
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from image_files import cifar_bytes, idx_bytes
from machine_limits import memory_limited_to
from PIL import Image

from jmp_train.data.image_folder import center_crops, random_crops
from jmp_train.data.public_images import read_cifar10_batch, read_idx

SIZE, MAX_PIXELS, MAX_BYTES = 16, 2_000_000, 2**24
MEMORY, SECONDS = 2**29, 60  # that reading a file may take
NUMBERS = (
    0,
    1,
    2,
    255,
    256,
    2**15 - 1,
    2**15,
    40_000,
    2**16 - 1,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
)
FORBIDDEN = re.compile(
    r"subprocess|socket|pickle|ctypes|shutil|os\.(exec|posix_spawn|spawn|fork|system|remove|rename|mkdir|link|symlink)"
)

Reader = Callable[[Path], tuple[np.ndarray, bool]]  # returns an array, and whether its shape is right


def main(folder: Path, seed: int, count: int) -> None:
    """Reads so many damaged files, the same ones for the same seed, and prints what came of it."""
    files = valid_files(np.random.default_rng(0))
    watched = Watch()
    sys.addaudithook(watched.hook)
    warnings.simplefilter("ignore")  # pillow's, of damage that it can do without
    for name, (reader, content) in files.items():  # so that all that decoders import is imported
        path = folder / name
        path.write_bytes(content)
        reader(path)
        path.unlink()
    watched.check(folder / "written")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()
    faults, slowest, names = [], 0.0, sorted(files)
    for number in range(count):
        random = np.random.default_rng((seed, number))
        name = names[number % len(names)]
        reader, content = files[name]
        other = files[names[random.integers(len(names))]][1]
        path = folder / f"{number}_{name}"
        path.write_bytes(damaged(random, content, other))
        start = time.process_time()
        with watched.on(), memory_limited_to(MEMORY):
            outcome = outcome_of(reader, path)
        slowest = max(slowest, time.process_time() - start)
        if outcome not in ("array", "error"):
            faults.append(f"{path.name}: {outcome}")
            continue
        outcomes[f"{path.suffix.removeprefix('.')}: {outcome}"] += 1
        path.unlink()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {
        "outcomes": dict(sorted(outcomes.items())),
        "faults": faults,
        "forbidden": watched.seen,
        "megabytes": (after - before) / 1024,
        "slowest": slowest,
    }
    print(json.dumps(report))


def outcome_of(reader: Reader, path: Path) -> str:
    """Returns "array", "error", or what it was that is neither."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        array, right = reader(path)
    except (ValueError, OSError) as error:
        return "error" if str(path) in str(error) else f"unnamed {error!r}"
    except BaseException as error:  # noqa: BLE001, which is what is looked for
        return repr(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return "array" if right and array.dtype == np.uint8 else f"{array.dtype}{array.shape}"


class Watch:
    """Notes, and prevents, what reading data has no business with: programs, sockets, files to write, code to run."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._watching = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Is called at each event that Python audits."""
        if self._watching and (FORBIDDEN.match(event) or _writes_or_runs(event, arguments)):
            self.seen.append(f"{event} {arguments}")
            raise RuntimeError(f"{event} while a file is read")

    def check(self, path: Path) -> None:
        """Raises AssertionError if a program or a file that is written went unseen."""
        for forbidden in (
            lambda: subprocess.run(("true",), check=True),
            lambda: path.write_text(""),
        ):
            with self.on(), suppress(RuntimeError):
                forbidden()
        assert len(self.seen) == 2, self.seen
        self.seen.clear()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watches what runs within."""
        self._watching = True
        try:
            yield
        finally:
            self._watching = False


def _writes_or_runs(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        return isinstance(arguments[1], str) and not arguments[1].startswith("r")
    if event == "exec":  # of a module that is imported, or of what a file holds
        return not Path(getattr(arguments[0], "co_filename", "")).is_relative_to(sys.base_prefix)
    return False


def valid_files(random: np.random.Generator) -> dict[str, tuple[Reader, bytes]]:
    """Returns a reader and a file's content by the file's name, of all formats and kinds of them."""
    images = random.integers(0, 256, (8, 28, 28), np.uint8)
    rows = cifar_bytes(random.integers(0, 256, (2, 32, 32, 3), np.uint8), np.array([3, 9]))
    files: dict[str, tuple[Reader, bytes]] = {
        "images.idx": (_read_images, idx_bytes(images)),
        "images.gz": (_read_images, gzip.compress(idx_bytes(images), mtime=0)),
        "labels.idx": (_read_labels, idx_bytes(images[0, 0])),
        "labels.gz": (_read_labels, gzip.compress(idx_bytes(images[0, 0]), mtime=0)),
        "rows.bin": (_read_rows, rows),
    }
    for name, content in valid_images(random).items():
        files[f"center_{name}"] = (_read_center, content)
        files[f"random_{name}"] = (_read_random, content)
    return files


def valid_images(random: np.random.Generator) -> dict[str, bytes]:
    """Returns files of all kinds that pillow writes, and by name what they are."""
    ramp = np.linspace(0, 1, 24 * 20 * 3).reshape(20, 24, 3)
    rgb = Image.fromarray((200 * ramp + random.integers(0, 50, ramp.shape)).astype(np.uint8))
    rgba = rgb.copy()
    rgba.putalpha(128)
    gray, palette = rgb.convert("L"), rgb.quantize(16)
    deep = Image.fromarray((65535 * ramp[..., 0]).astype(np.uint16))
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "turned"
    animation = {"save_all": True, "append_images": [gray.convert("RGB"), rgb]}

    def saved(image: Image.Image, format: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, format, **options)
        return file.getvalue()

    return {
        "rgb.jpg": saved(rgb, "JPEG", exif=exif),
        "gray.jpg": saved(gray, "JPEG"),
        "progressive.jpg": saved(rgb, "JPEG", progressive=True, restart_marker_blocks=2),
        "cmyk.jpg": saved(rgb.convert("CMYK"), "JPEG"),
        "several.jpg": saved(rgb, "MPO", **animation),
        "rgb.png": saved(rgb, "PNG", exif=exif, icc_profile=bytes(200), dpi=(72, 72)),
        "rgba.png": saved(rgba, "PNG"),
        "gray.png": saved(gray, "PNG", transparency=7),
        "gray_alpha.png": saved(rgba.convert("LA"), "PNG"),
        "palette.png": saved(palette, "PNG", transparency=bytes([0, 128])),
        "bits.png": saved(rgb.convert("1"), "PNG"),
        "deep.png": saved(deep, "PNG"),
        "moving.png": saved(rgb, "PNG", **animation),
        "rgb.webp": saved(rgb, "WEBP", exif=exif),
        "rgba.webp": saved(rgba, "WEBP", lossless=True),
        "moving.webp": saved(rgb, "WEBP", **animation),
        "rgb.bmp": saved(rgb, "BMP"),
        "palette.bmp": saved(palette, "BMP"),
        "bits.bmp": saved(rgb.convert("1"), "BMP"),
        "runs.bmp": _run_length_bmp(),
        "rgb.ppm": saved(rgb, "PPM"),
        "few_levels.ppm": b"P6\n# few levels\n8 6\n100\n" + bytes(np.arange(144, dtype=np.uint8) % 101),
        "text.ppm": b"P3\n8 6\n# in words\n255\n" + b" ".join(b"%d" % n for n in range(144)),
        "bits.ppm": saved(rgb.convert("1"), "PPM"),
        "deep.pgm": saved(deep, "PPM"),
        "rgb.tif": saved(rgb, "TIFF", exif=exif),
        "gray.tif": saved(gray, "TIFF", compression="tiff_lzw"),
        "rgba.tif": saved(rgba, "TIFF", compression="tiff_adobe_deflate"),
        "jpeg.tif": saved(rgb, "TIFF", compression="jpeg"),
        "fax.tif": saved(rgb.convert("1"), "TIFF", compression="group4"),
        "deep.tif": saved(deep, "TIFF", compression="packbits"),
        "cmyk.tif": saved(rgb.convert("CMYK"), "TIFF"),
        "several.tif": saved(palette, "TIFF", save_all=True, append_images=[gray]),
        "large.tif": saved(rgb, "TIFF", big_tiff=True),
    }


def _run_length_bmp() -> bytes:
    """Returns 8 x 4 pixels of two colors, the last row skipped by a delta; pillow writes none."""
    header = struct.pack("<IiiHHIIiiII", 40, 8, 4, 1, 8, 1, 0, 0, 0, 2, 0)
    colors = bytes([1, 2, 3, 0, 200, 100, 50, 0])
    runs = b"\x08\1\0\0\4\0\4\1\0\0\0\4\1\0\1\0\4\1\0\2\0\1\0\1"
    start = 14 + len(header) + len(colors)
    return b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + header + colors + runs


def _read_images(path: Path) -> tuple[np.ndarray, bool]:
    array = read_idx(path, 3, max_bytes=MAX_BYTES)
    return array, array.ndim == 3


def _read_labels(path: Path) -> tuple[np.ndarray, bool]:
    array = read_idx(path, 1, max_bytes=MAX_BYTES)
    return array, array.ndim == 1


def _read_rows(path: Path) -> tuple[np.ndarray, bool]:
    batch = read_cifar10_batch(path, max_bytes=MAX_BYTES)
    count = len(batch["label"])
    return batch["image"], count > 0 and batch["image"].shape == (count, 32, 32, 3)


def _read_center(path: Path) -> tuple[np.ndarray, bool]:
    array = center_crops([str(path)], SIZE, max_pixels=MAX_PIXELS)
    return array, array.shape == (1, SIZE, SIZE, 3)


def _read_random(path: Path) -> tuple[np.ndarray, bool]:
    array = random_crops([str(path)], [0], SIZE, max_pixels=MAX_PIXELS)
    return array, array.shape == (1, SIZE, SIZE, 3)


def damaged(random: np.random.Generator, content: bytes, other: bytes) -> bytes:
    """Returns a file's content after one to three changes, with the checksums of the format set right for some."""
    for _ in range(random.integers(1, 4)):
        if content.startswith(b"\x89PNG") and random.random() < 0.7:
            content = _damaged_chunk(random, content)
        elif content.startswith(b"\x1f\x8b") and random.random() < 0.7:
            content = _damaged_member(random, content, other)
        else:
            content = _changed(random, content, other)
    return content


def _changed(random: np.random.Generator, content: bytes, other: bytes) -> bytes:
    """Returns bytes with a change that knows nothing of the format."""
    data = bytearray(content)
    start, stop = sorted(random.integers(0, len(data) + 1, 2))
    kind = random.integers(9)
    if kind == 0 and data:  # flipped bits
        for at in random.integers(0, len(data), random.integers(1, 9)):
            data[at] ^= 1 << random.integers(8)
    elif kind == 1 and data:  # other bytes
        for at in random.integers(0, len(data), random.integers(1, 5)):
            data[at] = (0, 1, 127, 128, 255, random.integers(256))[random.integers(6)]
    elif kind == 2:  # another size or offset, in what may be a header
        at = random.integers(0, min(len(data), 100) + 1)
        order, width = "<>"[random.integers(2)], int(random.choice([2, 4]))
        number = int(random.choice(NUMBERS)) % 256**width
        data[at : at + width] = struct.pack(order + {2: "H", 4: "I"}[width], number)
    elif kind == 3:  # an end that is missing
        del data[start:]
    elif kind == 4:  # one that is too much
        data += other[: random.integers(1, 2000)]
    elif kind == 5:  # another file's end, or its beginning
        data[start:] = other[start:]
    elif kind == 6:
        data[: min(start, 64)] = other[: min(start, 64)]
    elif kind == 7:  # a piece left out
        del data[start : min(stop, start + 64)]
    else:  # or there many times
        data[start:start] = data[start:stop] * int(random.integers(1, 20))
    return bytes(data)


def _damaged_chunk(random: np.random.Generator, content: bytes) -> bytes:
    """Returns a PNG with a change in one of its chunks, or in what is compressed there, whose checksum is right."""
    chunks, at = [], 8
    while at + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, at)
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    if not chunks:
        return _changed(random, content, content)
    changed = random.integers(len(chunks))
    kind, data = chunks[changed]
    if kind == b"IDAT" and random.random() < 0.7:
        try:
            data = zlib.compress(_changed(random, zlib.decompress(data), content))
        except zlib.error:
            data = _changed(random, data, content)
    elif kind == b"IHDR" and random.random() < 0.7:  # width, height; bits, color, interlacing
        fields = bytearray(data.ljust(13, b"\0"))
        at = random.choice([0, 4, 8, 9, 12])
        values = NUMBERS if at < 8 else (0, 1, 2, 3, 4, 6, 8, 16)
        new = struct.pack(">I" if at < 8 else "B", int(random.choice(values)))
        fields[at : at + len(new)] = new
        data = bytes(fields)
    else:
        data = _changed(random, data, content)
    chunks[changed] = (kind, data)
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return content[:8] + b"".join(parts)


def _damaged_member(random: np.random.Generator, content: bytes, other: bytes) -> bytes:
    """Returns a gzip file of changed content, for some much longer than it was."""
    try:
        plain = gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return _changed(random, content, other)
    if len(plain) > MAX_BYTES:  # made so by the change before
        return content
    plain = _changed(random, plain, other)
    if len(plain) < MAX_BYTES and random.random() < 0.1:
        plain += bytes(2 * MAX_BYTES)
    return gzip.compress(plain, mtime=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
