from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from readers.image_folder import center_crops, random_box, random_crops, read_image_folder

pytestmark = pytest.mark.quick


def gradient_image(width: int, height: int) -> np.ndarray:
    """Returns an image whose red says the column and whose green says the row, uint8 [height, width, 3]."""
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = np.arange(width)
    image[..., 1] = np.arange(height)[:, None]
    return image


def save(path: Path, image: np.ndarray) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return str(path)


def test_classes_and_images_come_by_name(tmp_path: Path) -> None:
    image = gradient_image(4, 3)
    for name in ("train/b/2.png", "train/b/10.JPG", "train/a/x.jpeg", "train/c/y.webp", "val/c/z.png"):
        save(tmp_path / name, image)
    (tmp_path / "train/b/notes.txt").write_text("no image")
    (tmp_path / "train/README").write_text("no class")
    train, val, classes = read_image_folder(tmp_path)
    assert classes == ("a", "b", "c")
    names = ["a/x.jpeg", "b/10.JPG", "b/2.png", "c/y.webp"]
    assert train["path"].tolist() == [str(tmp_path / "train" / name) for name in names]
    assert train["label"].tolist() == [0, 1, 1, 2]
    assert val["path"].tolist() == [str(tmp_path / "val/c/z.png")]
    assert (val["label"].tolist(), val["label"].dtype) == ([2], np.int32)  # of training's classes


def test_folders_that_are_missing_empty_or_unknown_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train is not a folder; expected"):
        read_image_folder(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=r"train has no classes \(folders of images\)"):
        read_image_folder(tmp_path)
    image = gradient_image(4, 3)
    save(tmp_path / "train/cat/0.png", image)
    with pytest.raises(FileNotFoundError, match="val is not a folder"):
        read_image_folder(tmp_path)
    save(tmp_path / "val/dog/0.png", image)
    with pytest.raises(ValueError, match=r"val/dog: class 'dog' is missing in .*/train$"):
        read_image_folder(tmp_path)
    (tmp_path / "train/dog").mkdir()
    with pytest.raises(ValueError, match=r"train/dog has no images; they end in \.jpg, \.jpeg, "):
        read_image_folder(tmp_path)
    save(tmp_path / "train/dog/0.png", image)
    (tmp_path / "val/dog/0.png").unlink()
    with pytest.raises(ValueError, match=r"val has no images; they end in "):
        read_image_folder(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "text", "missing", "empty"])
def test_a_file_that_cannot_be_decoded_is_named(tmp_path: Path, damage: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)
    path = tmp_path / "image.jpg"
    good = save(tmp_path / "good.png", noise)
    save(path, noise)
    content = {"truncated": path.read_bytes()[:900], "text": b"no image at all", "empty": b""}
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[damage])
    with pytest.raises(ValueError, match=r"image\.jpg cannot be decoded as an image: "):
        center_crops([good, str(path)], 16)
    with pytest.raises(ValueError, match=r"image\.jpg cannot be decoded as an image: "):
        random_crops([good, str(path)], [0, 0], 16)


@pytest.mark.parametrize(("width", "height"), [(224, 224), (250, 200), (100, 251)])
def test_center_crops_are_torchvisions(tmp_path: Path, width: int, height: int) -> None:
    path = save(tmp_path / "image.png", gradient_image(width, height))
    # Resize(256): the short side, and the long one rounded down; CenterCrop(224): offsets rounded to even.
    size = (256, 256 * height // width) if width <= height else (256 * width // height, 256)
    resized = Image.open(path).resize(size, Image.Resampling.BILINEAR)
    left, upper = round((size[0] - 224) / 2.0), round((size[1] - 224) / 2.0)
    expected = np.asarray(resized.crop((left, upper, left + 224, upper + 224)))
    result = center_crops([path], 224)
    assert (result.shape, result.dtype) == ((1, 224, 224, 3), np.uint8)
    np.testing.assert_array_equal(result[0], expected)


def test_center_crops_of_other_sizes_are_in_proportion(tmp_path: Path) -> None:
    path = save(tmp_path / "image.png", gradient_image(128, 128))
    result = center_crops([path], 112)[0].astype(int)  # of 128 pixels, as they are
    np.testing.assert_array_equal(result[0, :, 0], np.arange(8, 120))
    np.testing.assert_array_equal(result[:, 0, 1], np.arange(8, 120))


def test_random_crops_are_the_box_resized_and_half_of_them_flipped(tmp_path: Path) -> None:
    path = save(tmp_path / "image.png", gradient_image(200, 150))
    crops = random_crops([path] * 200, list(range(200)), 16)
    assert (crops.shape, crops.dtype) == ((200, 16, 16, 3), np.uint8)
    flips = []
    for seed, crop in enumerate(crops):
        box = random_box(np.random.default_rng(seed), 200, 150)
        part = Image.open(path).crop(box).resize((16, 16), Image.Resampling.BILINEAR)
        expected = np.asarray(part)
        flipped = bool(crop[0, 0, 0] > crop[0, -1, 0])  # the columns count backward
        np.testing.assert_array_equal(crop[:, ::-1] if flipped else crop, expected)
        flips.append(flipped)
    assert 70 < sum(flips) < 130  # 100 +- 4 standard deviations


def test_random_boxes_have_torchvisions_areas_and_ratios() -> None:
    random = np.random.default_rng(0)
    boxes = np.array([random_box(random, 400, 300) for _ in range(4000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes[:, :2].min() == 0
    assert (boxes[:, 2].max(), boxes[:, 3].max()) == (400, 300)
    share, ratio = width * height / (400 * 300), width / height
    assert 0.07 < share.min() < 0.09
    assert 0.97 < share.max() <= 1
    assert 0.73 < ratio.min() < 0.77
    assert 1.30 < ratio.max() < 1.37
    # Small crops fit at any ratio, so these are uniform: of the area, and of the ratio's logarithm.
    small = share < 0.4
    assert share[small].mean() == pytest.approx(0.24, abs=0.01)
    assert np.log(ratio[small]).mean() == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize(
    ("size", "box"), [((1000, 3), (498, 0, 502, 3)), ((3, 1000), (0, 498, 3, 502)), ((1, 1), (0, 0, 1, 1))]
)
def test_of_images_that_no_ratio_fits_the_center_is_taken(
    size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    # Of 1000 x 3 pixels even the smallest share, 240 pixels, is of a greater ratio than 4/3 of 3.
    assert random_box(np.random.default_rng(0), *size) == box
