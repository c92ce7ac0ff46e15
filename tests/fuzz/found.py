"""What a case ends with that shows a broken promise."""

from __future__ import annotations


class Found(AssertionError):
    """kind: what findings of one cause have in common."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def command(what: str, seed: int) -> str:
    """What runs a case again, from the repository's folder."""
    return f".venv/bin/python tests/fuzz/run.py {what} --seed {seed} --cases 1"
