"""Command lines, run as a user would run them."""

from __future__ import annotations

import subprocess
import sys


def python(*arguments: object, **options) -> subprocess.CompletedProcess:
    """This interpreter with the arguments; stdout and stderr are captured as text."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, **options
    )


def fairseq(name: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """fairseq-NAME."""
    return python("-m", f"fairseq_cli.{name}", *arguments, **options)
