"""Pictures that PIL has opened, as colours of 8 bits, upright.

PIL's own conversion cuts off all above 255: a grey picture of 16 bits becomes white, one of numbers
from 0 to 1 black.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from paramshare.errors import ShareError

_BITS, _PHOTOMETRIC = 258, 262  # tags of a TIFF
_DARK = 1 / 16  # of white: the brightest pixel of 12 bits that are stored as 16


def colours(picture: Any) -> Any:
    """A PIL picture in RGB, in RGBA where it is transparent; of several frames the first.

    Raises ShareError where nothing says which number is white, and what PIL raises where the
    picture is damaged.
    """
    from PIL import ImageOps

    picture.load()
    black_and_white = _black_and_white(picture)
    with suppress(Exception):  # damaged EXIF, which says nothing of the pixels
        picture = ImageOps.exif_transpose(picture)
    if black_and_white is not None:
        picture = _grey(picture, *black_and_white)
    return picture.convert("RGBA" if picture.has_transparency_data else "RGB")


def _black_and_white(picture: Any) -> tuple[int, int] | None:
    """The numbers that are black and white, where they have more than 8 bits."""
    if picture.mode.startswith("I;16") or (
        picture.mode == "I" and picture.format in ("PNG", "PPM")
    ):
        tags = getattr(picture, "tag_v2", {})
        most = 2 ** tags.get(_BITS, (16,))[0] - 1
        return (most, 0) if tags.get(_PHOTOMETRIC) == 0 else (0, most)
    if picture.mode in ("I", "F"):
        kind = "whole numbers" if picture.mode == "I" else "fractions"
        raise ShareError(
            f"its pixels are {kind} of 32 bits, and nothing says which is white: "
            "store it with 8 or 16 bits a pixel"
        )
    return None


def _grey(picture: Any, black: int, white: int) -> Any:
    from PIL import Image

    numbers = np.asarray(picture)
    share = (numbers.astype(np.float32) - black) / (white - black)
    if 0 < share.max() < _DARK:
        raise ShareError(
            f"its brightest pixel has {share.max():.1%} of the brightness of white "
            f"({white:,}, black is {black:,}), so it would be black: scale its pixels to 16 bits, "
            "or store it with 8"
        )
    grey = Image.fromarray((share * 255).round().astype(np.uint8))
    if "transparency" in picture.info:  # the number that is transparent
        grey.putalpha(Image.fromarray(numbers != picture.info["transparency"]).convert("L"))
    return grey
