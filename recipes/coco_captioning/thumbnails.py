"""Small copies of pictures, for the gallery."""

from __future__ import annotations

from pathlib import Path

from stages import UserError

SIDE = 480  # pixels at most, for screens with two to a point of a card's width


def thumbnail(source: Path, folder: Path, name: str) -> Path:
    """Writes it into `folder`: a JPEG, or a PNG where there is transparency. Raises UserError where
    `source` cannot be read."""
    from PIL import Image, ImageOps

    try:
        with Image.open(source) as picture:
            picture.draft("RGB", (SIDE, SIDE))  # a JPEG is decoded at a fraction of its size
            clear = "A" in picture.getbands() or "transparency" in picture.info
            small = ImageOps.exif_transpose(picture).convert("RGBA" if clear else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{source} cannot be read as a picture: {error}") from None
    small.thumbnail((SIDE, SIDE))
    path = folder / f"{name}.{'png' if clear else 'jpg'}"
    small.save(path, quality=85)
    return path
