"""The way of a newcomer in recipes/bert_mlm/README.md: from a folder of text to a model that is
served, by its commands, with small numbers and without network."""

from __future__ import annotations

import os
import random
import re
import shlex
from pathlib import Path

import pytest
from commands import python
from loading import RECIPES
from made_up import texts, write, write_jsonl

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

README = (RECIPES / "bert_mlm" / "README.md").read_text("utf8")
SMALLER = {
    "prepare.py": "--vocab-size 256 --out prepared",
    "pretrain.py": "--data prepared --steps 3 --batch 4 --micro-batch 4 --precision fp32",
    "finetune.py": "--epochs 1",
}


def test_from_text_to_a_served_model(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(400)]
    for number in range(300):
        lines = [" ".join(draw.choices(words, k=9)) + "." for _ in range(6)]
        write(tmp_path / f"my_texts/{number}.txt", "\n".join(lines) + "\n")
    for split, count in (("train", 32), ("dev", 8)):
        write_jsonl(tmp_path / f"{split}.jsonl", texts(count))
    block = re.search(r"\n((?:    .+\n)+)", README)
    assert block is not None
    commands = re.sub(r"\s*#.*", "", block[1]).replace("\\\n", " ").strip().splitlines()
    install, *others = map(shlex.split, commands)
    assert install[:3] == ["pip", "install", "-e"]
    assert len(others) == 3
    environment = {**os.environ, "PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"}
    for interpreter, script, *arguments in others:
        assert interpreter == "python"
        path = RECIPES.parent / script
        more = SMALLER[path.name].split()
        done = python(path, *arguments, *more, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
    code = re.search(r"```python\n(.*?)```", README, re.S)
    assert code is not None
    done = python("-c", code[1], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[\{'label': '[01]', 'score': 0\.\d+\}\]", done.stdout)
