"""Aligned texts from the kinds of file that software documentation comes in.

Each reader takes files of one kind and gives their texts without the mark-up of that kind.
"""

import json
import re
import struct
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from clean import strip_accelerator, strip_markup


class RawPair(NamedTuple):
    """Two texts that translate each other, and the page they stand on."""

    page: str
    en: str
    vi: str


class Block(NamedTuple):
    """A run of text between two block-level tags; `tag` is the one before it ("p", "/li")."""

    tag: str
    id: str
    text: str


_BLOCK_TAG = re.compile(
    "address|article|aside|blockquote|body|caption|center|dd|div|dl|dt|fieldset|footer|form|h[1-6]"
    "|head|header|hr|html|li|main|nav|ol|p|pre|section|table|tbody|td|tfoot|th|thead|title|tr|ul"
)


class _BlockReader(HTMLParser):
    NOT_TEXT = frozenset(("head", "nav", "pre", "script", "style"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._tag, self._id, self._text, self._hidden = "", "", "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if _BLOCK_TAG.fullmatch(tag):
            self._next(tag, dict(attrs).get("id") or "")
        elif tag == "br":
            self._text += " "
        self._hidden += tag in self.NOT_TEXT

    def handle_endtag(self, tag: str) -> None:
        if _BLOCK_TAG.fullmatch(tag):
            self._next("/" + tag, "")
        self._hidden -= tag in self.NOT_TEXT

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._text += data

    def close(self) -> None:
        super().close()
        self._next("", "")

    def _next(self, tag: str, identity: str) -> None:
        text = " ".join(self._text.split())
        if text:
            self.blocks.append(Block(self._tag, self._id, text))
        self._tag, self._id, self._text = tag, identity, ""


def html_blocks(path: Path) -> list[Block]:
    """The texts of a page in order; what stands in <head>, <nav>, <pre> or scripts is left out."""
    reader = _BlockReader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    return reader.blocks


def pages_by_id(english: Path, vietnamese: Path, ids: tuple[str, ...]) -> Iterator[RawPair]:
    """The same page under two folders: elements with equal ids that start with one of `ids`."""
    for path in sorted(english.rglob("*.html")):
        page = path.relative_to(english)
        if not (vietnamese / page).is_file():
            continue
        # The first element of an id is the page's own; a later one was embedded again.
        translated: dict[str, str] = {}
        for block in html_blocks(vietnamese / page):
            translated.setdefault(block.id, block.text)
        for block in html_blocks(path):
            if block.id.startswith(ids) and block.id in translated:
                yield RawPair(page.as_posix(), block.text, translated.pop(block.id))


def pages_in_order(english: Path, vietnamese: Path) -> Iterator[RawPair]:
    """Two pages block by block; nothing if their sequences of tags differ anywhere."""
    blocks, translated = html_blocks(english), html_blocks(vietnamese)
    if [block.tag for block in blocks] != [block.tag for block in translated]:
        return
    for block, other in zip(blocks, translated, strict=True):
        yield RawPair(english.name, block.text, other.text)


def catalogue(path: Path) -> Iterator[RawPair]:
    """A compiled gettext catalogue (.mo, GNU format); of a message with a plural, the singular.

    The file is read here because Python's gettext has no public way to list the messages.
    """
    data = path.read_bytes()
    order = "<" if data[:4] == b"\xde\x12\x04\x95" else ">"
    count, originals, translations = struct.unpack_from(order + "3I", data, 8)

    def string(table: int, index: int) -> str:
        length, start = struct.unpack_from(order + "2I", data, table + 8 * index)
        return data[start : start + length].split(b"\0")[0].decode("utf-8")

    for index in range(count):
        # "context EOT message": the context is for the translator.
        message = string(originals, index).rpartition("\x04")[2]
        if message:  # the empty one is the catalogue's header
            translation = string(translations, index)
            # An older way to write a context, which Gramps has: "context|message".
            if "|" not in translation:
                message = message.rpartition("|")[2]
            en, vi = (strip_markup(strip_accelerator(text)) for text in (message, translation))
            yield RawPair(path.name, en, vi)


def json_messages(english: Path, vietnamese: Path) -> Iterator[RawPair]:
    """MediaWiki's message files: the same key in both, with wiki mark-up and tags taken off."""
    messages = json.loads(english.read_text(encoding="utf-8"))
    translated = json.loads(vietnamese.read_text(encoding="utf-8"))
    for key, message in messages.items():
        if key in translated and not key.startswith("@"):  # "@metadata" holds the authors
            en, vi = (strip_markup(strip_wikitext(text)) for text in (message, translated[key]))
            yield RawPair(english.name, en, vi)


def strip_wikitext(text: str) -> str:
    """Links and emphasis become their text; of {{PLURAL:..}} and {{GENDER:..}} one form stays."""
    previous = None
    while previous != text:  # from the inside out
        previous = text
        text = re.sub(r"\{\{GENDER:[^{}|]*\|?([^{}|]*)[^{}]*\}\}", r"\1", text, flags=re.I)
        text = re.sub(r"\{\{[^{}|]*\|(?:[^{}]*\|)?([^{}|]*)\}\}", r"\1", text)
        text = re.sub(r"\{\{([^{}|]*)\}\}", _variable, text)
        text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[(?:https?:|\$|//)\S*\s+([^\[\]]*)\]", r"\1", text)
    return re.sub(r"'{2,}", "", text)


def _variable(match: re.Match[str]) -> str:
    """{{SITENAME}} and {{int:key}} become {SITENAME} and {int_key}: placeholders, as $1 is."""
    return "{" + re.sub(r"\W", "_", match[1]) + "}"
