"""The run's options and seeds, and a made-up language pair: every word has one translation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import seeds
import torch
from commands import fairseq
from hypothesis import HealthCheck, settings

WORDS = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-tables",
        action="store_true",
        help="write the tables that tests make into the documentation",
    )
    parser.addoption("--seed", type=int, default=0, help="moves the seeds of all tests")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its options
def pytest_configure(config: pytest.Config) -> None:
    seeds.choose(config.getoption("seed"))
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.getoption("seed"))
    # A busy machine is no reason to fail.
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before the fixtures, of any scope
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)


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
