"""Image files become pixels of one shape, and a file that is no image is named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from trainwright.tasks.data.modalities.images import (
    ImageFiles,
    ImageRows,
    ImageShape,
    PackedImages,
    common_shape,
    decoded,
    pack,
)
from trainwright.tasks.errors import BadInput

Array = np.ndarray[Any, Any]


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """A smooth picture."""
    y, x = np.mgrid[0:height, 0:width] / np.array([height, width])[:, None, None]
    pixels = np.stack([255 * y, 255 * x, 255 * (1 - y * x)], axis=2).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(folder: Path, **pictures: Image.Image) -> list[str]:
    """The names of the files, `a_png` for a.png."""
    for name, image in pictures.items():
        image.save(folder / name.replace("_", "."))
    return [name.replace("_", ".") for name in pictures]


def packed(folder: Path, files: list[str], shape: ImageShape) -> ImageRows:
    pack(ImageFiles(folder, files), folder / "packed")
    return ImageRows(PackedImages(folder / "packed"), shape)


def shape_of(folder: Path, files: list[str], size: Any = None) -> ImageShape:
    return common_shape(ImageFiles(folder, files), size)


def test_images_of_one_size_keep_it(tmp_path: Path) -> None:
    files = saved(tmp_path, a_png=picture(300, 400), b_jpg=picture(300, 400))
    assert shape_of(tmp_path, files) == ImageShape(3, 300, 400)


def test_images_of_different_sizes_get_the_median_size(tmp_path: Path) -> None:
    files = saved(
        tmp_path, a_png=picture(10, 60), b_jpg=picture(30, 20), c_png=picture(20, 40, "L")
    )
    assert shape_of(tmp_path, files) == ImageShape(3, 20, 40)
    assert shape_of(tmp_path, files[:2]) == ImageShape(3, 20, 40)


def test_large_images_of_different_sizes_get_at_most_224_pixels_a_side(tmp_path: Path) -> None:
    files = saved(tmp_path, a_png=picture(400, 90), b_png=picture(500, 90))
    assert shape_of(tmp_path, files) == ImageShape(3, 224, 90)


def test_a_size_that_the_job_names_is_taken(tmp_path: Path) -> None:
    files = saved(tmp_path, a_png=picture(40, 60, "L"), b_png=picture(40, 60, "L"))
    shape = shape_of(tmp_path, files, (32, 16))
    assert shape == ImageShape(1, 32, 16)
    assert packed(tmp_path, files, shape).take(np.arange(2)).shape == (2, 1, 32, 16)


def test_pixels_of_the_right_size_are_those_of_the_file(tmp_path: Path) -> None:
    images = {"a_png": picture(12, 9), "b_png": picture(12, 9, "L"), "c_jpg": picture(12, 9)}
    files = saved(tmp_path, **images)
    found = packed(tmp_path, files, ImageShape(3, 12, 9)).take(np.array([2, 0, 1, 0]))
    for pixels, file in zip(found, ["c.jpg", "a.png", "b.png", "a.png"], strict=True):
        with Image.open(tmp_path / file) as image:
            assert np.array_equal(pixels, np.asarray(image.convert("RGB")).transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_kind_of_pixel_becomes_grey_or_rgb(tmp_path: Path, mode: str) -> None:
    file = "a.jpg" if mode == "CMYK" else "a.png"
    if mode == "I;16":
        grey = np.asarray(picture(8, 8, "L")).astype(np.uint16) * 257
        Image.fromarray(grey).save(tmp_path / file)
    else:
        picture(8, 8, mode).save(tmp_path / file)
    shape = shape_of(tmp_path, [file])
    assert shape.channels == (1 if mode in ("1", "L", "I;16") else 3)
    expected = picture(8, 8, mode if mode in ("1", "P") else "RGB" if shape.channels == 3 else "L")
    kind = "L" if shape.channels == 1 else "RGB"
    whole = np.asarray(expected.convert(kind)).astype(int).reshape(8, 8, -1)
    found = decoded(tmp_path / file, file, shape).transpose(1, 2, 0)
    assert np.abs(found - whole).max() <= (80 if mode == "CMYK" else 0)


def test_a_shrunk_jpeg_looks_like_one_that_was_decoded_whole(tmp_path: Path) -> None:
    picture(800, 640).save(tmp_path / "a.jpg", quality=95)
    found = decoded(tmp_path / "a.jpg", "a.jpg", ImageShape(3, 100, 80))
    with Image.open(tmp_path / "a.jpg") as image:
        whole = np.asarray(image.resize((80, 100), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.abs(found.astype(int) - whole).mean() < 2


def test_packed_images_are_those_of_the_files_in_the_order_asked_for(tmp_path: Path) -> None:
    sizes = [(random.Random(0).randint(5, 40), 20 + number) for number in range(50)]
    images = {f"n{number}_png": picture(*size) for number, size in enumerate(sizes)}
    files, shape = saved(tmp_path, **images), ImageShape(3, 16, 16)
    encoded = packed(tmp_path, files, shape)
    rows = np.random.default_rng(0).integers(0, 50, 200)
    found = encoded.take(rows)
    assert np.array_equal(found, ImageRows(ImageFiles(tmp_path, files), shape).take(rows))
    for pixels, row in zip(found, rows, strict=True):
        assert np.array_equal(pixels, decoded(tmp_path / files[row], "", shape))
    assert (encoded.shape, encoded.dtype) == ((50, 3, 16, 16), np.uint8)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    files = saved(tmp_path, a_png=picture(4, 4))
    (tmp_path / "notes.png").write_text("not an image")
    with pytest.raises(BadInput, match=r"data\.uri: .*: notes\.png can't be read as an image$"):
        shape_of(tmp_path, [*files, "notes.png"])


def test_a_format_for_which_pillow_starts_a_program_is_refused(tmp_path: Path) -> None:
    picture(4, 4).save(tmp_path / "drawing.png", format="EPS")
    with pytest.raises(BadInput, match=r"drawing\.png can't be read as an image$"):
        shape_of(tmp_path, ["drawing.png"])


def test_an_image_of_fractions_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(BadInput, match=r"a\.tiff can't be read as an image: .*fractions"):
        shape_of(tmp_path, ["a.tiff"])


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_an_image_that_is_cut_short_is_named_when_it_is_decoded(tmp_path: Path, kind: str) -> None:
    files = saved(tmp_path, **{"a_png": picture(256, 256), f"b_{kind}": picture(256, 256)})
    content = (tmp_path / files[1]).read_bytes()
    (tmp_path / files[1]).write_bytes(content[: len(content) * 3 // 4])
    encoded = packed(tmp_path, files, shape_of(tmp_path, files))
    assert encoded.take(np.array([0])).shape == (1, 3, 256, 256)
    with pytest.raises(BadInput, match=rf"b\.{kind} can't be read as an image: "):
        encoded.take(np.array([0, 1]))


def test_a_damaged_pack_is_not_mapped(tmp_path: Path) -> None:
    files = saved(tmp_path, a_png=picture(8, 8))
    packed(tmp_path, files, ImageShape(3, 8, 8))
    with (tmp_path / "packed" / "encoded.bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="damaged"):
        PackedImages(tmp_path / "packed")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "tiff"])
def test_a_picture_is_turned_as_its_camera_says(
    tmp_path: Path, kind: str, orientation: int
) -> None:
    path = tmp_path / f"a.{kind}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(40, 60).save(path, exif=exif, **({"lossless": True} if kind == "webp" else {}))
    with Image.open(path) as image:
        turned = ImageOps.exif_transpose(image)
        assert turned is not None
        shape = ImageShape(3, turned.height, turned.width)
        expected = np.asarray(turned.convert("RGB")).transpose(2, 0, 1)
    assert shape_of(tmp_path, [path.name]) == shape
    assert np.array_equal(decoded(path, path.name), expected)
    assert np.array_equal(decoded(path, path.name, shape), expected)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_data_turns_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    picture(40, 60).save(path, exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    assert decoded(path, "a.jpg").shape == (3, 40, 60)
