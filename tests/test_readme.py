"""What the README shows is what happens."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commands import fairseq, python

ROOT = Path(__file__).parents[1]


def blocks(language: str, file: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / file).read_text("utf8"), re.M | re.S)


def test_the_call_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    code = "\n".join(blocks("python"))
    printed = "".join(blocks("text"))
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
    assert [path.name for path in tmp_path.iterdir()] == ["tagger.safetensors"]


def test_transformers_code_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    code = "\n".join(blocks("python", "models/README.md"))
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "compression" in done.stdout
    assert "released" in done.stdout
    sizes = {
        n: (tmp_path / n / "model.safetensors").stat().st_size
        for n in ("shared-bert", "plain-bert", "light-small")
    }
    assert 2 * sizes["shared-bert"] < sizes["plain-bert"]
    assert sizes["light-small"] < 18e6


def test_the_fairseq_command_runs(corpus: Path, tmp_path: Path) -> None:
    command, _ = blocks("sh")  # the other one: tests/tasks/test_masked_lm.py
    user_dir = python("-m", "paramshare.cli", "user-dir").stdout.strip()
    command = command.replace("\\\n", " ")
    name, *arguments = shlex.split(
        command.replace('"$(paramshare user-dir)"', shlex.quote(user_dir))
    )
    assert name == "fairseq-train"
    arguments = [str(corpus / "joined") if a == "data/iwslt15_envi/bin" else a for a in arguments]
    assert str(corpus / "joined") in arguments
    done = fairseq("train", *arguments, "--max-update", 2, "--no-save", "--cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "columns read from virtual table" in done.stderr + done.stdout


@pytest.mark.parametrize(
    "file",
    [
        *("README.md", "models/README.md"),
        *("recipes/iwslt15_envi/README.md", "recipes/bert_mlm/README.md"),
        "recipes/coco_captioning/README.md",
    ],
)
def test_links_and_paths_exist(file: str) -> None:
    text = (ROOT / file).read_text("utf8")
    links = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in link]
    scripts = re.findall(r"((?:recipes|benchmarks|tests)/\S+\.py)", text)
    assert scripts
    for path in [(ROOT / file).parent / link for link in links] + [ROOT / s for s in scripts]:
        assert path.exists(), path
