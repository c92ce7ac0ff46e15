"""Debian packages, fetched and unpacked by Debian's own tools.

Without root, and without touching the system's package lists: everything is kept in one folder.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stages import PackageMissing, Say, UserError, scratch

TOOLS = ("apt-get", "dpkg-deb")


def has_tools() -> bool:
    return all(shutil.which(tool) for tool in TOOLS)


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

    def descriptions(self) -> Path:
        """A file with the English descriptions of all packages: apt's Translation-en indexes."""
        kept = self._archives / "Translation-en"
        if not kept.is_file():
            self._say("apt-get update with the package descriptions (into the cache folder)")
            self._apt_get("update", cwd=self._apt, languages="en")
            indexes = sorted((self._apt / "state/lists").glob("*_Translation-en"))
            if not indexes:
                raise PackageMissing("apt-get update brought no Translation-en index")
            self._archives.mkdir(parents=True, exist_ok=True)
            with scratch(self._archives, "download") as folder:
                whole = folder / kept.name
                whole.write_bytes(b"\n".join(index.read_bytes() for index in indexes))
                whole.rename(kept)
        return kept

    def _apt_get(self, *arguments: str, cwd: Path, languages: str = "none") -> None:
        for folder in ("state/lists/partial", "cache/archives/partial"):
            (self._apt / folder).mkdir(parents=True, exist_ok=True)
        # An empty list of installed packages: what this machine has installed does not matter.
        (self._apt / "status").touch()
        options = {
            "Dir::State": self._apt / "state",
            "Dir::State::Lists": self._apt / "state/lists",
            "Dir::State::status": self._apt / "status",
            "Dir::Cache": self._apt / "cache",
            "Acquire::Languages": languages,
            # Indexes as plain text, however this machine's apt likes to keep them.
            "Acquire::GzipIndexes": "false",
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


@contextmanager
def unpacked(archives: Sequence[Path], cache: Path) -> Iterator[Path]:
    """A folder with the files of all `archives`; gone afterwards, for they are large."""
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
        yield root
