"""The IWSLT15 English-Vietnamese files as they are passed around: checked, and made plain text.

The files are tokenised, with HTML entities. BLEU is to be measured on text as people write it, so
tokens are joined again here, and SentencePiece sees the joined text.
"""

import hashlib
import html
import re
from pathlib import Path

from clean import Pair, normalise
from stages import UserError, read_lines

SPLITS = {"train": "train", "dev": "tst2012", "test": "tst2013"}
MD5 = {
    "train.en": "5b6300f46160ab5a7a995546d2eeb9e6",
    "train.vi": "858e884484885af5775068140ae85dab",
    "tst2012.en": "c14a0955ed8b8d6929fdabf4606e3875",
    "tst2012.vi": "dddf990faa149e980b11a36fca4a8898",
    "tst2013.en": "c41c43cb6d3b122c093ee89608ba62bd",
    "tst2013.vi": "a3185b00264620297901b647a4cacf38",
}
# Word lists that come with the files and are not used; checked if they are there.
OPTIONAL_MD5 = {
    "vocab.en": "98b5011e1f579936277a273fd7f4e9b4",
    "vocab.vi": "e8b05f8c26008a798073c619236712b4",
}

_CLINGS_LEFT = re.compile(r"[.,!?;:%)\]}…”’»]+|'[^\W\d_]+|n't", re.IGNORECASE)
_CLINGS_RIGHT = re.compile(r"[(\[{“‘«$£€#]+")
_QUOTE = re.compile(r"[\"']")


def md5_sums(folder: Path) -> dict[str, str | None]:
    """File name -> MD5 in hex, None where a needed file is missing."""
    names = [*MD5, *(name for name in OPTIONAL_MD5 if (folder / name).is_file())]
    return {name: _md5(folder / name) for name in names}


def check(folder: Path, sums: dict[str, str | None], any_data: bool) -> None:
    """UserError that lists every file which is missing or, unless `any_data`, not IWSLT15's."""
    if not folder.is_dir():
        raise UserError(f"--data {folder}: there is no such folder")
    known = {**MD5, **OPTIONAL_MD5}
    bad = []
    for name, found in sums.items():
        if found is None:
            bad.append(f"  {name}: missing")
        elif not any_data and found != known[name]:
            bad.append(f"  {name}: MD5 is {found}, should be {known[name]}")
    if bad:
        cure = "give all six files" if any_data else "for files of your own add --any-data"
        raise UserError("\n".join([f"--data {folder} is not the IWSLT15 set; {cure}:", *bad]))


def read(folder: Path) -> dict[str, list[Pair]]:
    """train, dev and test as plain text; UserError if the two sides of a split do not fit."""
    return {split: read_split(folder, stem) for split, stem in SPLITS.items()}


def read_split(folder: Path, stem: str) -> list[Pair]:
    """One of them, by the name of its files."""
    english, vietnamese = (read_lines(folder / f"{stem}.{side}") for side in ("en", "vi"))
    if len(english) != len(vietnamese):
        raise UserError(
            f"{folder}: {stem}.en has {len(english)} lines and {stem}.vi {len(vietnamese)};"
            " line n of one must translate line n of the other"
        )
    pairs = [Pair(plain(en), plain(vi)) for en, vi in zip(english, vietnamese, strict=True)]
    if not any(pair.en and pair.vi for pair in pairs):
        raise UserError(f"{folder}: no line of {stem}.en and {stem}.vi has text on both sides")
    return pairs


def plain(line: str) -> str:
    """A tokenised line as it would be written.

    Entities become characters; . , ! ? ; : % and closing brackets cling to the token before them,
    and so do endings like 's, 're, n't; opening brackets and currency signs cling to
    the token after them; straight quotes open and close in turn.
    """
    text, glue, open_quotes = "", True, set()
    for token in normalise(html.unescape(line)).split():
        left, right = bool(_CLINGS_LEFT.fullmatch(token)), bool(_CLINGS_RIGHT.fullmatch(token))
        if _QUOTE.fullmatch(token):
            left, right = token in open_quotes, token not in open_quotes
            open_quotes ^= {token}
        text += token if glue or left else " " + token
        glue = right
    return text


def _md5(path: Path) -> str | None:
    if not path.is_file():
        return None
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
