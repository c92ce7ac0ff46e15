"""Fills the folder `pictures`: the stamps of Tux Paint, with a caption each, in COCO's format.

They are cut-out photographs and drawings of one thing. Beside NAME.png lies NAME.txt, whose first
line is the caption, in English; translations follow.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from debian import TOOLS, Packages, has_tools, unpacked
from plain import normalise
from stages import PackageMissing, Say, UserError

PACKAGE = "tuxpaint-stamps-default"
ANNOTATIONS = "annotations.json"
STAMPS = "usr/share/tuxpaint/stamps"
# Letters, figures, coins, flags: their captions name them, and say nothing of what is seen.
LEFT_OUT = ("symbols", "town/flags")
_NUMBER = re.compile(r"([-_]?\d+[a-z]?|[-_][a-z])$")
OWN = "give pictures of your own: --karpathy or --annotations, and --images"


def fill(folder: Path, cache: Path, say: Say) -> dict[str, int]:
    """Writes the pictures, and annotations.json; the figures of `collect`."""
    if not has_tools():
        raise UserError(f"no {PACKAGE} without {' and '.join(TOOLS)} (Debian, Ubuntu); {OWN}")
    try:
        archive = Packages(cache, say).get(PACKAGE)
    except PackageMissing as error:
        raise UserError(f"{error}\n{OWN}") from None
    say(f"reading {archive.name}")
    with unpacked([archive], cache) as root:
        return collect(root / STAMPS, folder)


def collect(stamps: Path, folder: Path) -> dict[str, int]:
    """Figures: `pictures`, and how many were left out because of what."""
    figures = dict.fromkeys(("pictures", "symbols_and_flags", "without_caption", "repeated"), 0)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    seen: set[bytes] = set()
    for path in sorted(stamps.rglob("*.png")):
        name = path.relative_to(stamps)
        text = path.with_suffix(".txt")
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if any(name.is_relative_to(other) for other in LEFT_OUT):
            figures["symbols_and_flags"] += 1
        elif not text.is_file():  # mirrored pictures of others
            figures["without_caption"] += 1
        elif digest in seen:
            figures["repeated"] += 1
        else:
            seen.add(digest)
            number = len(images) + 1
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
            caption = normalise(text.read_text("utf-8").partition("\n")[0])
            images.append({"id": number, "file_name": name.as_posix()})
            annotations.append({"id": number, "image_id": number, "caption": caption})
    if not images:
        raise UserError(f"{PACKAGE} has no pictures with captions in {STAMPS}; {OWN}")
    figures["pictures"] = len(images)
    found = {"images": images, "annotations": annotations}
    (folder / ANNOTATIONS).write_text(json.dumps(found, ensure_ascii=False), "utf-8")
    return figures


def variant(file_name: str) -> str:
    """What pictures of the same thing have in common: folder and name, without a number."""
    folder, _, name = file_name.rpartition("/")
    stem = name.removesuffix(".png")
    return f"{folder}/{_NUMBER.sub('', stem) or stem}"
