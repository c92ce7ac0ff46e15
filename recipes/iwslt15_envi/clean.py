"""Which sentence pairs are fit to train on, and which side of the split they are on.

Every rule is a pure function. `judge` gives a pair back, or the name of the first rule it breaks,
so that the caller can print what was dropped and why. Lengths count what stands between spaces.
"""

import hashlib
import html
import re
import unicodedata
from typing import NamedTuple

import plain
from plain import split_sentences

ENGLISH_WORDS = (3, 60)
VIETNAMESE_WORDS = (3, 80)
MAX_PLACEHOLDERS = 1  # a side
MIN_WORD_SHARE = 0.6  # of the English tokens
MIN_DIACRITIC_SHARE = 0.4  # of the Vietnamese words
MAX_COPIED_SHARE = 0.4  # of the Vietnamese words
LENGTH_RATIO = (0.5, 2.5)  # Vietnamese words for one English word

# Shares of the pages that are held out, chosen so that the help pages of LibreOffice 7.4 give
# about 400 dev and 350 test pairs.
DEV_SHARE = 0.040
TEST_SHARE = 0.036

TOO_SHORT = "under 3 words"
TOO_LONG = "over 60 English or 80 Vietnamese words"
PLACEHOLDERS = "more than one placeholder a side"
NOT_WORDS = "under 60% of the English tokens are words"
NO_DIACRITICS = "under 40% of the Vietnamese words have diacritics"
COPIED = "over 40% of the Vietnamese words are copied"
RATIO = "length ratio outside 0.5-2.5"
DUPLICATE = "English side already seen"
REASONS = (
    TOO_SHORT,
    TOO_LONG,
    PLACEHOLDERS,
    NOT_WORDS,
    NO_DIACRITICS,
    COPIED,
    RATIO,
    DUPLICATE,
)

# Tags that messages use. Anything else between < and > is text: "<none>", "<file name>".
_BREAK_TAG = re.compile(r"</?(?:br|dd|div|dl|dt|hr|li|ol|p|pre|table|td|th|tr|ul)\b[^<>]*>", re.I)
_TAG = re.compile(
    r"<!--.*?-->|</?(?:a|abbr|b|big|code|em|font|i|img|kbd|nowiki|s|samp|small|span|strike|strong|"
    r"sub|sup|syntaxhighlight|tt|u|var)\b[^<>]*>",
    re.IGNORECASE | re.DOTALL,
)
_FOOTNOTE = re.compile(r"\[\d+\]")
_ACCELERATOR = re.compile(r"[_~](?=\w)")
_PLACEHOLDER = re.compile(
    r"""
      \$\(\w+\) | \$\w+\$? | \$\{\w+\}         # $(ARG1)  $1  $name$  ${name}
    | %\(\w+\)[a-z]? | %[A-Z]\w+%? | %-?[\d.]*[a-z]\b | %\d   # %(name)s  %PRODUCTNAME  %s  %1
    | \{\w*(?::[^{}]*)?\}                      # {}  {name}  {0:d}
    """,
    re.VERBOSE,
)


class Pair(NamedTuple):
    """One English sentence and its Vietnamese translation."""

    en: str
    vi: str


def strip_markup(text: str) -> str:
    """A message without HTML (or Pango) tags; entities become characters."""
    return html.unescape(_TAG.sub("", _BREAK_TAG.sub(" ", text)))


def normalise(text: str) -> str:
    """NFC, without footnote marks and invisible characters; single spaces."""
    return plain.normalise(_FOOTNOTE.sub(" ", unicodedata.normalize("NFC", text)))


def strip_accelerator(text: str) -> str:
    """Without the mark of a menu's shortcut key: "Save _As", "Đón~g".

    A text with several marks has names with underscores, and is left alone.
    """
    return _ACCELERATOR.sub("", text) if len(_ACCELERATOR.findall(text)) == 1 else text


def sentence_pairs(en: str, vi: str) -> list[Pair]:
    """The normalised texts, sentence by sentence if both sides have equally many, else whole."""
    en, vi = normalise(en), normalise(vi)
    english, vietnamese = split_sentences(en), split_sentences(vi)
    if len(english) != len(vietnamese):
        return [Pair(en, vi)]
    return [Pair(*pair) for pair in zip(english, vietnamese, strict=True)]


def judge(pair: Pair) -> Pair | str:
    """The pair itself if it is fit to train on, else one of REASONS."""
    english, vietnamese = pair.en.split(), pair.vi.split()
    if len(english) < ENGLISH_WORDS[0] or len(vietnamese) < VIETNAMESE_WORDS[0]:
        return TOO_SHORT
    if len(english) > ENGLISH_WORDS[1] or len(vietnamese) > VIETNAMESE_WORDS[1]:
        return TOO_LONG
    if max(len(_PLACEHOLDER.findall(side)) for side in pair) > MAX_PLACEHOLDERS:
        return PLACEHOLDERS
    if len(words(pair.en)) < MIN_WORD_SHARE * len(english):
        return NOT_WORDS
    vi_words = words(pair.vi)
    if sum(map(has_diacritic, vi_words)) < MIN_DIACRITIC_SHARE * max(len(vi_words), 1):
        return NO_DIACRITICS
    en_words = set(words(pair.en))
    if sum(word in en_words for word in vi_words) > MAX_COPIED_SHARE * len(vi_words):
        return COPIED
    if not LENGTH_RATIO[0] <= len(vietnamese) / len(english) <= LENGTH_RATIO[1]:
        return RATIO
    return pair


def words(text: str) -> list[str]:
    """The tokens that are words, lower-cased, without the punctuation around them."""
    bare = (token.lower().strip(".,;:!?…()[]{}\"'“”‘’«»/*") for token in text.split())
    return [word for word in bare if re.fullmatch(r"[^\W\d_]+(?:[-'’/][^\W\d_]+)*", word)]


def has_diacritic(word: str) -> bool:
    """Whether a word has a letter that plain English has not: an accent, a tone mark or đ."""
    return any(not c.isascii() for c in word)


def duplicate_key(pair: Pair) -> str:
    """Pairs with equal keys are duplicates; the first one is kept."""
    return pair.en.lower()


def split_of(page: str) -> str:
    """ "train", "dev" or "test", by the page's name alone: the same on every machine, every day."""
    digest = hashlib.sha256(page.encode("utf-8")).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    if position < DEV_SHARE:
        return "dev"
    return "test" if position < DEV_SHARE + TEST_SHARE else "train"
