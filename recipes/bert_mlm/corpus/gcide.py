"""The dictionary of the package dict-gcide: entries without pronunciation and other markup."""

import re
import unicodedata
from collections.abc import Iterator
from itertools import groupby

# \Cau"te*lous\ (k[add]"t[-e]*l[u^]s), and without the first part in plurals.
_PRONUNCIATION = re.compile(
    r"""\s*\\[^\\]*\\(?:\s*\([^()]*\))?|\s*\(-[^()\s]*\)|\s*\([\w\[\]^=.-]*["*`][^()\s]*\)"""
)
# --Shak.  --Sir W. Scott.  Longer ones only where nothing follows: --Beau. & Fl.
_AUTHOR = re.compile(
    r"\s*--(?:(?:[A-Z]|Sir|Lord|Bp|Abp|Mrs|Dr)\.?\s)*[A-Z][\w'-]+\.?"
    r"(?:\s&\s[A-Z]\w*\.?)?(?:\s\([^()]*\)\.?)?(?=\s|$)"
    r"|\s*--[A-Z][^\[\]]{0,40}?(?=\s*(?:\[|$))"
)
_BRACKETS = re.compile(r"\s*\[[^\[\]]*\]")  # [Obs.]  [1913 Webster]  [F. lame a thin plate]
_DERIVED = re.compile(  # -- Cau"te*lous*ly, adv.
    r"""\s*--\s[\w"*`'-]+["*`][\w"*`'-]+,\s(?:adv|a|n)\."""
)
_FIELD = re.compile(r"\((?:[A-Z][a-z]*\.[ ,&]*)+\)\s*")  # (Bot.)  (Physiol. Chem.)
_NUMBER = re.compile(r"^(?:\d+\.|\([a-z]\))\s+|(?<=\w\. )1\.\s+")
_SPACE_BEFORE = re.compile(r"\s+(?=[,.;:)])")

# A letter and what is above or below it: ['e]  [=a]  [u^]  [asl] and others by name.
_ACCENTED = re.compile(r"\[(?:(?P<before>[^\w\s\[\]])(?P<letter>[A-Za-z]{1,2})|(?P<name>\w+)\^?)\]")
_MARKS = {"'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303", ",": "\u0327"}
_NAMED = {"ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "eth": "ð", "thorn": "þ", "deg": "°"}
_NAMED |= {"aum": "ä", "oum": "ö", "uum": "ü", "asl": "a", "esl": "e", "isl": "i"}


def entries(lines: Iterator[str]) -> Iterator[list[str]]:
    """The paragraphs of each entry. An entry starts at the left margin, with a pronunciation."""
    entry: list[str] = []
    started = False
    for line in lines:
        if line[:1].strip() and "\\" in line:
            if started:
                yield _paragraphs(entry)
            entry, started = [], True
        entry.append(line.strip())
    if started:
        yield _paragraphs(entry)


def strip_markup(paragraph: str) -> str:
    text = _PRONUNCIATION.sub("", paragraph)
    text = _ACCENTED.sub(_letter, text)
    text = _AUTHOR.sub("", text)
    previous = None
    while previous != text:  # brackets stand in brackets
        previous, text = text, _BRACKETS.sub("", text)
    text = _DERIVED.sub("", text.replace("{", "").replace("}", ""))
    text = _FIELD.sub("", _NUMBER.sub("", text.strip()))
    return _SPACE_BEFORE.sub("", text).strip()


def _paragraphs(lines: list[str]) -> list[str]:
    joined = (" ".join(group) for filled, group in groupby(lines, bool) if filled)
    return [strip_markup(paragraph) for paragraph in joined]


def _letter(found: re.Match[str]) -> str:
    """The letter, with the marks that languages write; those of pronunciation are left out."""
    if found["before"]:
        return unicodedata.normalize("NFC", found["letter"] + _MARKS.get(found["before"], ""))
    if len(found["name"]) == 1 and found[0].endswith("^]"):
        return found["name"]
    return _NAMED.get(found["name"], found[0])
