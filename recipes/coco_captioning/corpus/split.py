"""Which side a picture is on, by a hash, so that it depends on nothing but the picture."""

import hashlib
from collections.abc import Mapping

from corpus.stamps import variant

SPLITS = ("train", "valid", "test")
SHARES = {"test": 0.2, "valid": 0.1}  # of the stamps; the others are train


def halves(pictures: Mapping[int, str]) -> dict[int, str]:
    """Of the official validation pictures, whose test pictures have no captions."""
    return {id: "valid" if place(str(id)) < 0.5 else "test" for id in pictures}


def by_picture(pictures: Mapping[int, str]) -> dict[int, str]:
    """Of stamps: variants of one picture stay together. pictures: file names."""
    return {id: _side(place(variant(name))) for id, name in pictures.items()}


def _side(place: float) -> str:
    for split, share in SHARES.items():
        if place < share:
            return split
        place -= share
    return "train"


def place(text: str) -> float:
    """From 0 to 1, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
