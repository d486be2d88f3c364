"""Folders of images, one folder per class, as in torchvision's `ImageFolder`, and the crops of its references.

The data flow: `read_image_folder` -> paths and labels -> `random_crops` or `center_crops` -> uint8 arrays.
"""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")

_SCALE = (0.08, 1.0)  # of a random crop: the range of its fraction of the area
_RATIO = (3 / 4, 4 / 3)  # and of its width divided by its height
_TRIES = 10
_BILINEAR = 2  # of `PIL.Image.Resampling`

Box = tuple[int, int, int, int]  # left, upper, right, lower


def read_image_folder(
    data_dir: Path,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], tuple[str, ...]]:
    """Finds the images of DIR/train/CLASS and DIR/val/CLASS, without opening them.

    Args:
      data_dir: the folder DIR.

    Returns:
      Training and validation data, each a dictionary with `path`, objects [images] that are strings, and `label`,
      int32 [images]; and the sorted names of the classes, which labels index. Images are sorted by class and
      name.

    Raises:
      FileNotFoundError: a folder is missing.
      ValueError: there are no classes, a training class has no images, validation has a class that training
        does not have, or validation has no images.
    """
    folders = {part: _classes_in(data_dir / part) for part in ("train", "val")}
    classes = tuple(sorted(folders["train"]))
    unknown = sorted(set(folders["val"]) - set(classes))
    if unknown:
        raise ValueError(f"{folders['val'][unknown[0]]}: class {unknown[0]!r} is missing in {data_dir / 'train'}")
    train = _images_of(folders["train"], classes)
    empty = np.flatnonzero(np.bincount(train["label"], minlength=len(classes)) == 0)
    if len(empty):
        folder = folders["train"][classes[empty[0]]]
        raise ValueError(f"{folder} has no images; they end in {', '.join(SUFFIXES)}")
    val = _images_of(folders["val"], classes)
    if not len(val["label"]):
        raise ValueError(f"{data_dir / 'val'} has no images; they end in {', '.join(SUFFIXES)}")
    return train, val, classes


def _classes_in(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; expected DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg")
    classes = {path.name: path for path in folder.iterdir() if path.is_dir()}
    if not classes:
        raise ValueError(f"{folder} has no classes (folders of images)")
    return classes


def _images_of(folders: dict[str, Path], classes: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the images of the classes with a folder."""
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if name not in folders:
            continue
        images = _images_in(folders[name])
        paths += images
        labels += [label] * len(images)
    return {"path": np.array(paths, object), "label": np.array(labels, np.int32)}


def _images_in(folder: Path) -> list[str]:
    return sorted(entry.path for entry in os.scandir(folder) if entry.name.lower().endswith(SUFFIXES))


def read_image(path: str) -> "Image.Image":
    """Returns an image in RGB, without transparency and unrotated, as torchvision reads it.

    Args:
      path: the file.

    Raises:
      ValueError: the file is not an image or is damaged; the message names it.
    """
    from PIL import Image  # here, since other jobs import this module's neighbors without pillow

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # of any class, because pillow's decoders detect damage in many places
        raise ValueError(f"{path} cannot be decoded as an image: {error}") from error


def random_crops(paths: Iterable[str], seeds: Iterable[int], size: int) -> np.ndarray:
    """Returns a random crop of each image, randomly flipped, uint8 [images, size, size, 3].

    It computes torchvision's RandomResizedCrop(size) and RandomHorizontalFlip(): 0.08 to 1 of the area, an aspect ratio
    of 3/4 to 4/3, bilinear with antialiasing; half of the crops are flipped.

    Args:
      paths: paths of the images, [images].
      seeds: from 0 to below 2**64, [images]; each crop depends only on its own seed.
      size: the side in pixels.

    Raises:
      ValueError: an image cannot be read; the message names it. See `read_image`.
    """
    return np.stack([_random_crop(path, int(seed), size) for path, seed in zip(paths, seeds, strict=True)])


def _random_crop(path: str, seed: int, size: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    image = read_image(path)
    # Crop first: the filter must not look beyond the crop, as resize(box=...) does.
    crop = np.asarray(image.crop(random_box(random, *image.size)).resize((size, size), _BILINEAR))
    return crop[:, ::-1] if random.random() < 0.5 else crop


def random_box(random: np.random.Generator, width: int, height: int) -> Box:
    """Returns the part of an image that RandomResizedCrop takes.

    Args:
      random: the random number generator.
      width: width of the image in pixels.
      height: height of the image in pixels.

    Reference: torchvision.transforms.RandomResizedCrop.get_params.
    """
    for _ in range(_TRIES):
        area = width * height * random.uniform(*_SCALE)
        ratio = math.exp(random.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            upper = int(random.integers(0, height - crop_height + 1))
            left = int(random.integers(0, width - crop_width + 1))
            return left, upper, left + crop_width, upper + crop_height
    # The whole image, except for the ends of a side that is too long.
    crop_width = min(width, round(height * _RATIO[1]))
    crop_height = min(height, round(width / _RATIO[0]))
    left, upper = (width - crop_width) // 2, (height - crop_height) // 2
    return left, upper, left + crop_width, upper + crop_height


def center_crops(paths: Iterable[str], size: int) -> np.ndarray:
    """Returns the center of each image, uint8 [images, size, size, 3].

    It computes torchvision's Resize(256) and CenterCrop(224), bilinear with antialiasing, or both in proportion to
    `size`.

    Args:
      paths: paths of the images.
      size: the side in pixels.

    Raises:
      ValueError: an image cannot be read; the message names it. See `read_image`.
    """
    return np.stack([_center_crop(path, size) for path in paths])


def _center_crop(path: str, size: int) -> np.ndarray:
    image = read_image(path)
    width, height = image.size
    short, by = size * 256 // 224, min(width, height)
    image = image.resize((width * short // by, height * short // by), _BILINEAR)
    left, upper = round((image.width - size) / 2), round((image.height - size) / 2)
    return np.asarray(image.crop((left, upper, left + size, upper + size)))
