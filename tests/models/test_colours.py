"""Pictures of all modes as colours: scaled as they should be, or refused, but never black."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from paramshare import ShareError
from paramshare.models.colours import colours


def stored(picture: Image.Image, form: str, **options: Any) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def of(numbers: Any, kind: Any = np.uint16) -> Image.Image:
    return Image.fromarray(np.array([numbers], kind))


def tiff(data: bytes, width: int, bits: int, photometric: int, sample: int = 1) -> Image.Image:
    """One line of grey pixels, most significant bit first, numbers little-endian."""
    tags = [(256, width), (257, 1), (258, bits), (259, 1), (262, photometric), (273, 8)]
    tags += [(277, 1), (278, 1), (279, len(data)), (339, sample)]
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags)
    content = struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data
    content += struct.pack("<H", len(tags)) + entries + bytes(4)
    return Image.open(io.BytesIO(content))


GREY = [0, 128, 255]
SIXTEEN = [0, 128 * 257, 65535]


@pytest.mark.parametrize("form", ["png", "tiff", "ppm", "jpeg2000"])
def test_16_bits(form: str) -> None:
    options = {"irreversible": False} if form == "jpeg2000" else {}
    picture = stored(of(SIXTEEN), form, **options)
    assert picture.mode in ("I;16", "I")
    found = colours(picture)
    assert found.mode == "RGB"
    assert np.array(found).tolist() == [[[grey] * 3 for grey in GREY]]


def test_16_bits_of_tiff() -> None:
    """Big-endian; white as 0; 12 bits; 12 bits where white is 0."""
    big = tiff(np.array(SIXTEEN, "<u2").tobytes(), 3, 16, 1)
    assert np.array(colours(big))[0, :, 0].tolist() == GREY
    negative = tiff(np.array(SIXTEEN, "<u2").tobytes(), 3, 16, 0)
    assert np.array(colours(negative))[0, :, 0].tolist() == [255, 127, 0]
    assert negative.mode == "I;16"
    packed = tiff(bytes([0x00, 0x08, 0x00, 0xFF, 0xF0]), 3, 12, 1)
    assert np.asarray(packed).tolist() == [[0, 0x800, 0xFFF]]
    assert np.array(colours(packed))[0, :, 0].tolist() == GREY


def test_numbers_that_would_be_black() -> None:
    """12 bits, or numbers of things, stored as 16; black itself is black."""
    for most in (1, 255, 4095):
        with pytest.raises(ShareError, match=r"its brightest pixel has \d\.\d% of the brightness"):
            colours(stored(of([0, most]), "png"))
    assert np.array(colours(stored(of([0, 4096]), "png"))).max() == 16
    assert not np.array(colours(stored(of([0, 0]), "png"))).any()


@pytest.mark.parametrize("numbers", [[0, 0.5, 1], [0, 128, 255], [0, 1, 65535], [-1, 0, np.nan]])
@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_32_bits_are_refused(numbers: list[float], kind: Any) -> None:
    with np.errstate(invalid="ignore"):
        array = np.array([numbers]).astype(kind)
    for picture in (stored(Image.fromarray(array), "tiff"), Image.fromarray(array)):
        with pytest.raises(ShareError, match=r"its pixels are \w+.* of 32 bits, and nothing says"):
            colours(picture)


def test_transparency() -> None:
    red = Image.new("RGB", (4, 4), "red")
    palette = red.convert("P", palette=Image.Palette.ADAPTIVE)
    seen = palette.getpixel((0, 0))
    for picture, expected in (
        (stored(palette, "png"), (255, 0, 0)),
        (stored(palette, "png", transparency=seen), (255, 0, 0, 0)),
        (stored(palette, "gif", transparency=seen), (255, 0, 0, 0)),
        (stored(palette, "png", transparency=bytes([51] * (seen + 1))), (255, 0, 0, 51)),
        (stored(red, "png", transparency=(255, 0, 0)), (255, 0, 0, 0)),
        (stored(Image.new("LA", (4, 4), (9, 51)), "png"), (9, 9, 9, 51)),
        (stored(Image.new("L", (4, 4), 9), "png", transparency=9), (9, 9, 9, 0)),
        (stored(Image.new("1", (4, 4), 1), "png", transparency=1), (255, 255, 255, 0)),
        (stored(Image.new("PA", (4, 4)), "tiff"), (0, 0, 0, 0)),
        (stored(of([257 * 9, 65535]), "png", transparency=257 * 9), (9, 9, 9, 0)),
        (stored(of([257 * 9, 65535]), "png", transparency=7), (9, 9, 9, 255)),
    ):
        assert colours(picture).getpixel((0, 0)) == expected, picture


def test_other_modes() -> None:
    red = Image.new("RGB", (8, 8), "red")
    for picture in (
        stored(red.convert("CMYK"), "tiff"),
        stored(red.convert("CMYK"), "jpeg", quality=100),
        stored(red.convert("YCbCr"), "tiff"),
        stored(red.convert("LAB"), "tiff"),
        stored(red, "gif", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")]),
        stored(red, "tiff", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")]),
    ):
        found = colours(picture)
        assert found.mode == "RGB"
        assert np.abs(np.array(found, int) - (255, 0, 0)).max() < 8, picture
