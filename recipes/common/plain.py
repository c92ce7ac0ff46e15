"""Plain text: one normal form, and where its sentences end."""

import re
import unicodedata

_SENTENCE_END = re.compile(r"""[.!?…]["'”’»)\]]*\s+""")


def normalise(text: str) -> str:
    """NFC, without invisible characters; single spaces."""
    # Soft hyphens and zero-width spaces (category Cf) would be pieces of their own. Tabs and line
    # feeds are control characters (Cc) too, so they become spaces first.
    text = " ".join(unicodedata.normalize("NFC", text).split())
    if not text.isprintable():
        text = "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf"))
    return " ".join(text.split())


def split_sentences(text: str) -> list[str]:
    """Cut after . ! ? or … where the next word does not start with a lower-case letter."""
    sentences, start = [], 0
    for end in _SENTENCE_END.finditer(text):
        if end.end() < len(text) and not text[end.end()].islower():
            sentences.append(text[start : end.end()].strip())
            start = end.end()
    return [*sentences, text[start:].strip()]
