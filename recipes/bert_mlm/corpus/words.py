"""Fills the folder `words`: similarities and analogies of words, which gensim's tests hold."""

import zipfile
from pathlib import Path

from stages import UserError

PACKAGE, VERSION = "gensim", "4.4.0"
NAMES = ("wordsim353.tsv", "simlex999.txt", "questions-words.txt")


def fill(folder: Path, package: Path) -> dict[str, int]:
    """Figures: the lines of each file."""
    figures = {}
    try:
        with zipfile.ZipFile(package) as archive:
            for name in NAMES:
                content = archive.read(f"gensim/test/test_data/{name}")
                (folder / name).write_bytes(content)
                figures[name] = content.count(b"\n")
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(
            f"{package} is not as expected; delete it and run the same command again:\n{error}"
        ) from None
    return figures
