"""A real English-Vietnamese corpus out of Debian's packages: documentation and its translations.

`SOURCES` says which packages hold what.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from debian import TOOLS, Packages, has_tools, unpacked
from extract import RawPair, catalogue, json_messages, pages_by_id, pages_in_order
from stages import PackageMissing, Say, UserError, only_one


class Source(NamedTuple):
    """Where pairs come from.

    `read` gets the folder in which `packages` are unpacked together. Only sources with pages of
    running text can be `held_out` from, and only a `required` one must be there.
    """

    name: str
    packages: tuple[str, ...]
    read: Callable[[Path], Iterator[RawPair]]
    required: bool = False
    held_out: bool = False


def libreoffice_help(root: Path) -> Iterator[RawPair]:
    """Help pages: headings have ids hd_..., paragraphs par_..., the same in every language."""
    pages = root / "usr/share/libreoffice/help"
    return pages_by_id(pages / "en-US/text", pages / "vi/text", ids=("hd_", "par_"))


def libreoffice_interface(root: Path) -> Iterator[RawPair]:
    for path in sorted((root / "usr/lib/libreoffice/program/resource/vi").rglob("*.mo")):
        yield from catalogue(path)


def maint_guide(root: Path) -> Iterator[RawPair]:
    """The Debian New Maintainers' Guide: NAME.en.html and NAME.vi.html."""
    docs = root / "usr/share/doc"
    for english in sorted((docs / "maint-guide/html").glob("*.en.html")):
        name = english.name.replace(".en.html", ".vi.html")
        vietnamese = docs / "maint-guide-vi/html" / name
        if vietnamese.is_file():
            yield from pages_in_order(english, vietnamese)


def installation_guide(root: Path) -> Iterator[RawPair]:
    guide = root / "usr/share/doc/installation-guide-amd64"
    for english in sorted((guide / "en").glob("*.html")):
        vietnamese = guide / "vi" / english.name
        if vietnamese.is_file():
            yield from pages_in_order(english, vietnamese)


def mediawiki(root: Path) -> Iterator[RawPair]:
    """The messages of MediaWiki, its skins and its extensions."""
    for vietnamese in sorted((root / "usr/share/mediawiki").rglob("vi.json")):
        english = vietnamese.with_name("en.json")
        if english.is_file():
            yield from json_messages(english, vietnamese)


def locale_catalogues(root: Path) -> Iterator[RawPair]:
    for path in sorted((root / "usr/share/locale/vi/LC_MESSAGES").glob("*.mo")):
        yield from catalogue(path)


# Of duplicates the first is kept, so the text that is held out from comes first.
SOURCES = (
    Source(
        "libreoffice-help",
        ("libreoffice-help-en-us", "libreoffice-help-vi"),
        libreoffice_help,
        required=True,
        held_out=True,
    ),
    Source("libreoffice-l10n", ("libreoffice-l10n-vi",), libreoffice_interface, required=True),
    Source("maint-guide", ("maint-guide", "maint-guide-vi"), maint_guide),
    Source("installation-guide", ("installation-guide-amd64",), installation_guide),
    Source("mediawiki", ("mediawiki",), mediawiki),
    Source("gimp", ("gimp-data",), locale_catalogues),
    Source("gramps", ("gramps",), locale_catalogues),
)


def raw_pairs(cache: Path, say: Say) -> tuple[dict[str, list[RawPair]], list[str]]:
    """All pairs of each source that can be had, and a line for each source that cannot.

    UserError if Debian's tools are missing, or a required source is.
    """
    if not has_tools():
        raise UserError(
            f"{' and '.join(TOOLS)} are not on this machine, so the Debian packages cannot be had;"
            " run this on Debian or Ubuntu, or give a folder with the IWSLT15 files: --data DIR"
        )
    packages = Packages(cache, say)
    found: dict[str, list[RawPair]] = {}
    missing: list[str] = []
    with only_one(cache):
        for source in SOURCES:
            try:
                archives = [packages.get(name) for name in source.packages]
                say(f"reading {source.name}")
                found[source.name] = _read(source, archives, cache)
            except PackageMissing as error:
                if source.required:
                    raise UserError(
                        f"{source.name}: {error}\nThe corpus cannot do without it. Check the"
                        " network and the apt sources of this machine and run the same command"
                        " again, or give a folder with the IWSLT15 files: --data DIR"
                    ) from None
                missing.append(f"{source.name}: {error}")
                say(f"left out {missing[-1]}")
    return found, missing


def _read(source: Source, archives: list[Path], cache: Path) -> list[RawPair]:
    with unpacked(archives, cache) as root:
        pairs = list(source.read(root))
    if not pairs:
        raise PackageMissing(f"no pairs in {', '.join(a.name for a in archives)}")
    return pairs
