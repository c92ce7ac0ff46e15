"""Holds out a part of a text of so few documents that the hash has chosen none of them.

The train files are those of `collect`: each document ends with an empty line.
"""

from collections.abc import Callable
from pathlib import Path

from stages import UserError

LAST_SHARE = 0.05  # of the lines of a lone document
_END = "\n\n"


def move_document(folder: Path, is_chosen: Callable[[str], bool]) -> int:
    """The chosen one goes from its train file to dev.txt; its words."""
    for path in sorted(folder.glob("train-*.txt")):
        documents = path.read_text("utf-8").split(_END)[:-1]
        if chosen := next(filter(is_chosen, documents), None):
            others = (other + _END for other in documents if other is not chosen)
            _write(path, "".join(others))
            _write(folder / "dev.txt", chosen + _END)
            return len(chosen.split())
    raise ValueError("no document is the chosen one")


def cut_document(folder: Path) -> tuple[int, int]:
    """The last lines of the only document go to dev.txt; how many, and their words. UserError."""
    (path,) = folder.glob("train-*.txt")
    lines = path.read_text("utf-8").removesuffix(_END).split("\n")
    if len(lines) < 2:
        raise UserError(
            "the text has only one line with words, of which no part can be held out; give more"
            " text, or break it into lines, of a sentence or paragraph each"
        )
    count = max(1, round(LAST_SHARE * len(lines)))
    last = "\n".join(lines[-count:])
    _write(path, "\n".join(lines[:-count]) + _END)
    _write(folder / "dev.txt", last + _END)
    return count, len(last.split())


def _write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8", newline="\n")
