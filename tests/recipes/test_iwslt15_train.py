"""The recipe's training, scoring and demo, through their command lines on a made-up corpus."""

from __future__ import annotations

import json
import random
import re
import string
from pathlib import Path

import pytest
from commands import python

pytest.importorskip("fairseq")
pytest.importorskip("sentencepiece")

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "iwslt15_envi"


def script(name: str, *arguments: object, **options):
    return python(RECIPE / name, *arguments, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files named as IWSLT15's: random words, enough of them for 4,000 pieces."""
    folder = tmp_path_factory.mktemp("files")
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=7)) for _ in range(4000)]
    for name, count in (("train", 1500), ("tst2012", 20), ("tst2013", 12)):
        lines = [" ".join(draw.choices(words, k=draw.randint(4, 9))) for _ in range(count)]
        (folder / f"{name}.en").write_text("\n".join(lines) + "\n", "utf8")
        reverse = [" ".join(reversed(line.split())) for line in lines]
        (folder / f"{name}.vi").write_text("\n".join(reverse) + "\n", "utf8")
    return folder


@pytest.fixture(scope="module")
def demo(files: Path, tmp_path_factory: pytest.TempPathFactory):
    """(folder of the demo's results, what it printed)"""
    out = tmp_path_factory.mktemp("demo")
    arguments = ["--data", files, "--any-data", "--minutes", "0.1", "--out", out]
    done = script("demo.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_demo_shows_a_table_and_ten_translations(demo) -> None:
    out, printed = demo
    results = json.loads((out / "results.json").read_text())
    baseline, veps = results["baseline"], results["veps"]
    # The size "demo" with 4,000 types, as in the recipe's README.
    assert (baseline["stored_parameters"], veps["stored_parameters"]) == (1_900_544, 541_184)
    for text in ("unshared twin", "shared (VEPS)", "1,900,544", "541,184", "3.51x"):
        assert text in printed
    assert "the pipeline, not the quality" in printed
    assert printed.count("reference  ") == 10
    assert veps["signatures"][0].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert 0 <= veps["bleu"] <= 100
    for name in ("columns.png", "loss.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert len((out / "veps" / "test.vi").read_text("utf8").splitlines()) == 12


def test_scoring_a_trained_model(demo) -> None:
    """The score of the demo again, by score.py, which prints its command and the signatures."""
    out, _ = demo
    done = script("score.py", out / "veps", "--data", out / "data")
    assert done.returncode == 0, done.stderr
    bleu = json.loads((out / "results.json").read_text())["veps"]["bleu"]
    assert f"veps: BLEU {bleu:.1f}" in done.stdout
    assert "fairseq_cli.generate" in done.stdout
    assert re.search(r"nrefs:1\|.*\|version:", done.stdout)


def test_scoring_without_a_model(tmp_path: Path) -> None:
    done = script("score.py", tmp_path)
    assert done.returncode == 2
    assert "holds no checkpoint_best.pt; train it first" in done.stderr


def test_training_prints_its_command_and_passes_options_on(demo, tmp_path: Path) -> None:
    out, _ = demo
    done = script(
        *("train.py", "veps", "--size", "small", "--data", out / "data" / "bin"),
        *("--out", tmp_path, "--updates", "2", "--share-blocks", "3", "--no-save"),
    )
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[0]
    assert "fairseq_cli.train" in command
    assert "--share veps" in command
    assert command.endswith("--share-blocks 3 --no-save")
    assert "aligned/3" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["veps"], "say when to stop: --updates or --minutes"),
        (["veps", "--data", "nowhere", "--updates", "1"], "run recipes/iwslt15_envi/prepare.py"),
        (["other", "--updates", "1"], "invalid choice: 'other'"),
    ],
)
def test_training_explains_itself(arguments, message: str, demo) -> None:
    out, _ = demo
    if "--data" not in arguments:
        arguments = [*arguments, "--data", out / "data" / "bin"]
    done = script("train.py", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_demo_refuses_no_time() -> None:
    done = script("demo.py", "--minutes", "0")
    assert done.returncode == 2
    assert "say how long to train" in done.stderr


def test_probes_are_what_the_readme_shows() -> None:
    """README's table is printed by probe.py from its committed runs, none of which it repeats."""
    done = script("probe.py", "--data", "nowhere")
    assert done.returncode == 0, done.stderr
    runs = (RECIPE / "probes.jsonl").read_text("utf8").splitlines()
    table = done.stdout.splitlines()
    assert len(table) == 2 + len(runs)
    readme = (RECIPE / "README.md").read_text("utf8")
    assert done.stdout in readme
