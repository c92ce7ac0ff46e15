"""English text out of packages, as documents: lists of paragraphs.

Readers yield what a source says in its own order; `collect` cleans it. Of duplicates the first is
kept, so running text comes before dictionaries.
"""

import gzip
import pydoc_data.topics
import re
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from corpus import gcide
from debian import TOOLS, Packages, has_tools, unpacked
from stages import PackageMissing, Say

Document = list[str]

# How the topics of pydoc are set: underlined headings, *emphasis*, words broken at a hyphen.
_RULE = re.compile(r"^\s*([*=~^-])\1{2,}$", re.MULTILINE)
_EMPHASIS = re.compile(r"\*+(\w[\w .-]*)\*+")
_HYPHENATED = re.compile(r"(?<=\w-)\n\s+(?=\w)")


class Source(NamedTuple):
    """Where documents come from: `read` gets the folder in which the package is unpacked."""

    package: str
    read: Callable[[Path], Iterator[Document]]


def essays(root: Path) -> Iterator[Document]:
    """An Anarchist FAQ: each section is a document."""
    for path in sorted((root / "usr/share/doc/anarchism/html").glob("*.html")):
        page = _Page()
        page.feed(path.read_text("utf-8", errors="replace"))
        page.close()
        yield from page.sections


def dictionary(root: Path) -> Iterator[Document]:
    with gzip.open(root / "usr/share/dictd/gcide.dict.dz", "rt", encoding="latin-1") as lines:
        yield from gcide.entries(lines)


def wordnet(root: Path) -> Iterator[Document]:
    """Each set of synonyms: its words, what they mean, and examples."""
    for part in ("noun", "verb", "adj", "adv"):
        with open(root / f"usr/share/wordnet/data.{part}", encoding="utf-8") as lines:
            yield from (synset(line) for line in lines if not line.startswith(" "))


def synset(line: str) -> Document:
    """From: offset file part count word id ... | gloss; "example"."""
    fields, _, gloss = line.partition("|")
    parts = fields.split()
    words = [parts[4 + 2 * n] for n in range(int(parts[3], 16))]
    # Adjectives say where they stand: "asleep(p)".
    names = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words]
    meaning, *examples = re.split(r';\s*(?=")', gloss.strip())
    return [f"{', '.join(names)}: {meaning}", *(example.strip('" ') for example in examples)]


def descriptions(path: Path) -> Iterator[Document]:
    """Each package of apt's index: the summary, and the paragraphs and points below it."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        document: Document = []
        for line in lines:
            line = line.rstrip()
            if line.startswith("Description-en:"):
                document = [line.partition(":")[2].strip(), ""]
            elif not line.startswith(" "):
                if document:
                    yield document
                document = []
            elif line.strip() == ".":
                document.append("")
            elif point := re.match(r"\s+(?:[-*+o•]|\d+[.)])\s+(.*)", line):
                document.append(point[1])
            else:
                document[-1] = f"{document[-1]} {line.strip()}"
        if document:
            yield document


def python_topics() -> Iterator[Document]:
    """The language reference, as pydoc shows it."""
    for topic in pydoc_data.topics.topics.values():
        plain = _RULE.sub("", _EMPHASIS.sub(r"\1", _HYPHENATED.sub("", topic)))
        yield plain.split("\n\n")


SOURCES = (
    Source("anarchism", essays),
    Source("wordnet-base", wordnet),
    Source("dict-gcide", dictionary),
)


def documents(
    cache: Path, say: Say, missing: list[str]
) -> Iterator[tuple[str, Iterator[Document]]]:
    """The sources that can be had; for each other one a line is added to `missing`."""
    yield "pydoc", python_topics()
    if not has_tools():
        names = ", ".join(source.package for source in SOURCES)
        missing.append(f"{names}, apt: not without {' and '.join(TOOLS)} (Debian, Ubuntu)")
        return
    packages = Packages(cache, say)
    for source in SOURCES:
        try:
            archive = packages.get(source.package)
        except PackageMissing as error:
            missing.append(f"{source.package}: {error}")
            continue
        say(f"reading {source.package}")
        with unpacked([archive], cache) as root:
            yield source.package, source.read(root)
    try:
        index = packages.descriptions()
    except PackageMissing as error:
        missing.append(f"apt: {error}")
        return
    say("reading the package descriptions")
    yield "apt", descriptions(index)


class _Page(HTMLParser):
    """Collects the paragraphs of a page; a heading starts a new section."""

    BLOCKS = {"p", "div", "li", "ul", "ol", "blockquote", "br", "hr", "table", "tr", "td", "pre"}
    HEADINGS = {"h1", "h2", "h3", "h4"}
    IGNORED = {"script", "style", "title", "head"}

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: list[Document] = [[""]]
        self._ignored = 0

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        self._ignored += tag in self.IGNORED
        if tag in self.HEADINGS:
            self.sections.append([""])
        elif tag in self.BLOCKS:
            self.sections[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._ignored -= tag in self.IGNORED
        if tag in self.HEADINGS | self.BLOCKS:
            self.sections[-1].append("")

    def handle_data(self, data: str) -> None:
        if not self._ignored:
            self.sections[-1][-1] += data
