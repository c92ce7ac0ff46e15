"""Pictures in files: those that cannot be used are named before the training, and when it reads."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")
pytest.importorskip("PIL")

from PIL import Image

from paramshare import ShareError
from paramshare.models.backbones import Transform
from paramshare.tasks.captions import Captions, check_pictures
from paramshare.tasks.pictures import open_picture

TRANSFORM = Transform((0.0,) * 3, (1.0,) * 3)
FORMS = ("png", "jpg", "gif", "tiff", "webp", "bmp", "ppm")


def found(path: Path) -> tuple[str | None, str | None]:
    """What prepare.py says of the picture, and what the training says, None where all is well."""
    captions = Captions(path, None, {1: path.name}, {1: ["a"]})
    check_pictures(captions, path.parent)
    kinds = list(captions.defects) or [None]
    try:
        pixels = open_picture(path, TRANSFORM)
        assert pixels.shape == (3, 224, 224)
        assert ((pixels >= 0) & (pixels <= 1)).all()
    except ShareError as error:
        return kinds[0], str(error)
    return kinds[0], None


def write(path: Path, size: tuple[int, int] = (30, 20)) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    picture.convert("P" if path.suffix == ".gif" else "RGB").save(path)
    return path


@pytest.mark.parametrize(
    ("kind", "name"),
    [("float32", "fractions"), ("int32", "whole numbers"), ("uint16", "brightest")],
)
def test_numbers_that_are_no_colours(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    Image.fromarray(np.eye(9, dtype=kind)).save(path)
    before, later = found(path)
    assert before == "picture of which nothing says what is white"
    assert later.startswith(f"{path} is no picture that can be read: its ")
    assert name in later


def test_pictures_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 299)
    assert found(path) == (
        "picture of over 598 pixels",
        f"{path} is too large (Image size (600 pixels) exceeds limit of 598 pixels): scale it down",
    )
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)  # PIL warns, and reads it
    with pytest.warns(Image.DecompressionBombWarning):
        assert found(path) == (None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        assert found(path)[1].endswith("(600 pixels) exceeds limit of 300 pixels): scale it down")


@pytest.mark.parametrize("form", FORMS)
def test_damaged_pictures(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are damaged: read or refused, and by both alike."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)  # so that none takes long
    path = write(tmp_path / f"a.{form}")
    whole, draw = path.read_bytes(), random.Random(form)
    assert found(path) == (None, None)
    path.write_bytes(whole[: len(whole) // 2])
    assert found(path)[0] == "broken picture"
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PIL, of the damage
        for _ in range(120):
            content = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                content[draw.randrange(min(len(content), 120))] = draw.randrange(256)
            path.write_bytes(content)
            before, later = found(path)
            assert (before is None) == (later is None), (before, later)
            if later is not None:
                assert later.startswith(f"{path} is ")
                refused += 1
    assert refused


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"P6 0 0 255\n", b"P6 0 5 255\n", b"P5 5"])
def test_what_is_no_picture(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.ppm"
    path.write_bytes(content)
    before, later = found(path)
    assert before == "broken picture"
    assert "is no picture that can be read" in later
    path.unlink()
    assert found(path) == ("missing picture", f"{path} is not there")
    path.mkdir()
    assert found(path)[0] == "missing picture"
