"""Small copies of pictures, for the gallery."""

from __future__ import annotations

from pathlib import Path

from stages import UserError

SIDE = 480  # pixels at most, for screens with two to a point of a card's width


def thumbnail(source: Path, folder: Path, name: str) -> Path:
    """Writes it into `folder`: a JPEG, or a PNG where there is transparency. Raises UserError where
    `source` cannot be read."""
    from PIL import Image

    from paramshare.models.colours import colours

    try:
        with Image.open(source) as picture:
            picture.draft("RGB", (SIDE, SIDE))  # a JPEG is decoded at a fraction of its size
            small = colours(picture)
    except Exception as error:  # a damaged file fails in many ways
        said = str(error) or type(error).__name__
        raise UserError(f"{source} cannot be read as a picture: {said}") from None
    clear = small.mode == "RGBA"
    small.thumbnail((SIDE, SIDE))
    path = folder / f"{name}.{'png' if clear else 'jpg'}"
    small.save(path, quality=85)
    return path
