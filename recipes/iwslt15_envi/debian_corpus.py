"""A real English-Vietnamese corpus out of Debian's packages: documentation and its translations.

Packages are fetched and unpacked by Debian's own tools, without root and without touching the
system's package lists. `SOURCES` says which packages hold what.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from extract import RawPair, catalogue, json_messages, pages_by_id, pages_in_order
from stages import Say, UserError, only_one, scratch


class PackageMissing(Exception):
    """A package could not be had; the message is the reason."""


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
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise UserError(
                f"{tool} is not on this machine, so the Debian packages cannot be had; run this on"
                " Debian or Ubuntu, or give a folder with the IWSLT15 files: --data DIR"
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


class Packages:
    """Debian packages in `cache`, downloaded when they are asked for the first time."""

    def __init__(self, cache: Path, say: Say) -> None:
        self._archives = cache / "archives"
        self._apt = cache / "apt"
        self._say = say
        self._lists_are_fresh = False

    def get(self, name: str) -> Path:
        """The path of the .deb; PackageMissing if it cannot be downloaded."""
        self._archives.mkdir(parents=True, exist_ok=True)
        kept = sorted(self._archives.glob(f"{name}_*.deb"))
        if kept:
            return kept[-1]
        if not self._lists_are_fresh:
            self._say("apt-get update (into the cache folder, not the system's lists)")
            self._apt_get("update", cwd=self._apt)
            self._lists_are_fresh = True
        self._say(f"downloading {name}")
        # apt-get writes into the current folder, so it gets one of its own.
        with scratch(self._archives, "download") as folder:
            self._apt_get("download", name, cwd=folder)
            (archive,) = folder.glob("*.deb")
            return archive.rename(self._archives / archive.name)

    def _apt_get(self, *arguments: str, cwd: Path) -> None:
        for folder in ("state/lists/partial", "cache/archives/partial"):
            (self._apt / folder).mkdir(parents=True, exist_ok=True)
        # An empty list of installed packages: what this machine has installed does not matter.
        (self._apt / "status").touch()
        options = {
            "Dir::State": self._apt / "state",
            "Dir::State::Lists": self._apt / "state/lists",
            "Dir::State::status": self._apt / "status",
            "Dir::Cache": self._apt / "cache",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            # Only root switches to the user _apt, who cannot write here.
            "APT::Sandbox::User": "root",
        }
        command = ["apt-get", "-q"]
        for key, value in options.items():
            command += ["-o", f"{key}={value}"]
        run = subprocess.run(
            [*command, *arguments],
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
        )
        if run.returncode != 0:
            raise PackageMissing(f"apt-get {' '.join(arguments)} failed:\n{run.stderr.strip()}")
        # An index that cannot be had is only a warning to apt-get update.
        for line in run.stderr.splitlines():
            self._say(f"apt-get: {line}")


def _read(source: Source, archives: list[Path], cache: Path) -> list[RawPair]:
    """Unpacks into a folder that is gone afterwards (hundreds of megabytes), and reads."""
    with scratch(cache, "unpacked") as root:
        for archive in archives:
            run = subprocess.run(
                ["dpkg-deb", "-x", str(archive), str(root)], capture_output=True, text=True
            )
            if run.returncode != 0:
                raise UserError(
                    f"{archive} cannot be unpacked; delete it and run the same command again:\n"
                    f"{run.stderr.strip()}"
                )
        pairs = list(source.read(root))
    if not pairs:
        raise PackageMissing(f"no pairs in {', '.join(a.name for a in archives)}")
    return pairs
