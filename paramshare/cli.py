"""The `paramshare` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import paramshare
from paramshare.errors import ShareError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="paramshare", description="Dense weights read from a model's own embedding table."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {paramshare.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "user-dir",
        help="print the folder of the fairseq plugins",
        description='For fairseq: fairseq-train DATA --user-dir "$(paramshare user-dir)" ...',
    )
    parser.parse_args(arguments)
    print(user_dir())
    return 0


def user_dir() -> Path:
    """The folder for fairseq's `--user-dir`.

    fairseq imports it by its base name, with its parent first on `sys.path`; so the name is
    unique and the parent holds nothing else.
    """
    spec = find_spec("paramshare.tasks")  # found, not imported: that takes fairseq and seconds
    if spec is None or not spec.submodule_search_locations:
        raise ShareError("paramshare.tasks is not installed: pip install 'paramshare[fairseq]'")
    return Path(spec.submodule_search_locations[0]) / "user_dir" / "paramshare_fairseq"


if __name__ == "__main__":
    raise SystemExit(main())
