"""Options of the test run, and a made-up language pair: every word has one translation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from commands import fairseq

WORDS = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-tables",
        action="store_true",
        help="write the tables that tests make into the documentation",
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `joined` and `separate`, fairseq's data with one and with two dictionaries."""
    pytest.importorskip("fairseq")
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for split, count in (("train", 500), ("valid", 40), ("test", 20)):
        sentences = [
            [draw.randrange(WORDS) for _ in range(draw.randint(3, 9))] for _ in range(count)
        ]
        for language in ("en", "vi"):
            lines = [" ".join(f"{language}{w}" for w in s) for s in sentences]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    for name, extra in (("joined", ["--joined-dictionary"]), ("separate", [])):
        done = fairseq(
            *("preprocess", "--source-lang", "en", "--target-lang", "vi", *extra),
            *("--trainpref", folder / "train", "--validpref", folder / "valid"),
            *("--testpref", folder / "test", "--destdir", folder / name),
        )
        assert done.returncode == 0, done.stderr
    return folder
