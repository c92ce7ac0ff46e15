"""Pretraining and the comparison of recipes/bert_mlm, by their command lines, on made-up blocks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import python
from loading import RECIPES, load
from safetensors.torch import save_file

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

masking, training, stages = load("bert_mlm", "masking", "training", "stages")
SCRIPT = RECIPES / "bert_mlm" / "pretrain.py"


def command(data: Path, out: Path, *options: object, model: str = "share-half-depth") -> list[str]:
    given = (model, "--data", data, "--out", out, *options, "--precision", "fp32")
    return [str(SCRIPT), *map(str, given)]


def run(data: Path, out: Path, *options: object) -> subprocess.CompletedProcess:
    return python(*command(data, out, "--steps", 6, "--batch", 8, "--micro-batch", 4, *options))


def losses(out: Path) -> list[float]:
    log = json.loads((out / "results.json").read_text("utf-8"))["log"]
    return [entry["loss"] for entry in log if "loss" in entry]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("pretrained") / "whole"
    done = run(data, out)
    assert done.returncode == 0, done.stderr
    return out


# ---------------------------------------------------------------------- masks


def test_shares_of_the_masks(tokenizer) -> None:
    """15% are chosen; of these 80% are masked, 10% are another token, 10% stay."""
    masks = masking.Masks(tokenizer)
    plain = np.array([i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids])
    block = np.tile(plain, 2000)
    inputs, labels = masks.draw(block, (0, 0))
    chosen = labels != masking.IGNORED
    assert abs(chosen.mean() - 0.15) < 0.005
    assert (labels[chosen] == block[chosen]).all()
    assert (inputs[~chosen] == block[~chosen]).all()
    masked = inputs[chosen] == tokenizer.mask_token_id
    kept = inputs[chosen] == block[chosen]
    assert abs(masked.mean() - 0.8) < 0.01
    # One random token in so many is the token itself.
    assert abs(kept.mean() - 0.1 - 0.1 / len(plain)) < 0.01
    others = inputs[chosen][~masked & ~kept]
    assert set(others) == set(plain)


def test_special_tokens_are_never_chosen(tokenizer) -> None:
    block = np.array(tokenizer.all_special_ids * 500)
    inputs, labels = masking.Masks(tokenizer).draw(block, (0, 0))
    assert (labels == masking.IGNORED).all()
    assert (inputs == block).all()


def test_whole_words(tokenizer) -> None:
    """All pieces of a word, or none; words are chosen as often as tokens were."""
    ids = tokenizer("xyz " * 3000, add_special_tokens=False)["input_ids"]
    assert len(ids) == 9000
    _, labels = masking.Masks(tokenizer, whole_words=True).draw(np.array(ids), (0, 0))
    chosen = (labels != masking.IGNORED).reshape(3000, 3)
    assert (chosen.all(1) == chosen.any(1)).all()
    assert abs(chosen.mean() - 0.15) < 0.02


def test_order_of_the_examples(tokenizer) -> None:
    """Every epoch has each block once, in another order and under other masks."""
    blocks = [np.full((count, 8), number + 4) for number, count in enumerate((3, 4))]
    for number, shard in enumerate(blocks):
        shard[:, 0] = np.arange(len(shard)) + 10 * (number + 1)
    masks = masking.Masks(tokenizer)
    examples = masking.Blocks(blocks, masks, seed=1, count=14)
    assert len(examples) == 14

    def originals(indices: range) -> list[tuple[int, ...]]:
        found = []
        for index in indices:
            example = examples[index]
            ids, labels = example["input_ids"], example["labels"]
            found.append(tuple(ids.where(labels == masking.IGNORED, labels).tolist()))
        return found

    first, second = originals(range(7)), originals(range(7, 14))
    assert sorted(first) == sorted(second) == sorted(tuple(x) for b in blocks for x in b.tolist())
    assert first != second
    assert originals(range(7)) == first
    plain = masking.Blocks(blocks, masks, seed=1)
    assert len(plain) == 7


# ---------------------------------------------------------------------- pretraining


def test_the_model_is_a_folder_for_transformers(whole: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    import paramshare.models.pretrained  # noqa: F401

    model = AutoModelForMaskedLM.from_pretrained(whole)
    assert model.bert.sharing is not None
    assert AutoTokenizer.from_pretrained(whole).mask_token == "<mask>"
    assert len(losses(whole)) == 6
    assert not (whole / "checkpoints").exists()


def test_a_finished_run_is_not_repeated(data: Path, whole: Path) -> None:
    before = (whole / "results.json").stat().st_mtime_ns
    done = run(data, whole)
    assert done.returncode == 0
    assert "finished before" in done.stdout
    assert (whole / "results.json").stat().st_mtime_ns == before


def test_a_folder_of_other_settings_is_left_alone(data: Path, whole: Path) -> None:
    done = run(data, whole, "--lr", 0.5)
    assert done.returncode == 1
    assert "was begun with lr 0.001, not 0.5: delete it, or give another --out" in done.stderr


def test_a_killed_run_goes_on_to_the_same_losses(data: Path, whole: Path, tmp_path: Path) -> None:
    """Killed after a checkpoint, with another one half written and a third one damaged."""
    out = tmp_path / "killed"
    options = ("--steps", 6, "--batch", 8, "--micro-batch", 4, "--save-every", 2)
    first = subprocess.Popen(
        [sys.executable, *command(data, out, *options)], stdout=subprocess.DEVNULL, stderr=-3
    )
    checkpoint = tmp_path / "killed/checkpoints/checkpoint-2"
    while not (checkpoint / "trainer_state.json").exists():
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    for later in checkpoint.parent.iterdir():
        if later != checkpoint:
            shutil.rmtree(later)
    half = shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-4"))
    (half / "trainer_state.json").write_text('{"log_history": [')
    damaged = shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-5"))
    os.truncate(damaged / "optimizer.pt", 1000)
    done = python(*command(data, out, *options))
    assert done.returncode == 0, done.stderr
    said = f"{damaged} is damaged, an older one is looked for: optimizer.pt: it breaks off"
    assert said in done.stdout
    assert losses(out) == pytest.approx(losses(whole), abs=1e-6)


def trainers_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"state": torch.zeros(50)}, folder / name)
    save_file({"weight": torch.zeros(50)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("name", "size"),
    [("optimizer.pt", 0), ("rng_state.pth", 90), ("training_args.bin", 3)]
    + [("model.safetensors", size) for size in (0, 5, 60, 250)],
)
def test_the_last_whole_checkpoint(
    tmp_path: Path, name: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever file breaks off; the damaged one is left there."""
    older, newer = (trainers_checkpoint(tmp_path / f"checkpoint-{n}") for n in (900, 1000))
    assert training.last_checkpoint(tmp_path) == str(newer)
    os.truncate(newer / name, size)
    assert training.last_checkpoint(tmp_path) == str(older)
    assert f"{newer} is damaged, an older one is looked for: {name}: " in capsys.readouterr().out
    os.truncate(older / name, size)
    with pytest.raises(stages.UserError, match=f"no checkpoint in {tmp_path} is whole"):
        training.last_checkpoint(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {older.name, newer.name}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("settings.json", "{", "settings.json is damaged: Expecting property name"),
        ("settings.json", "[]", "settings.json is damaged"),
        ("results.json", '{"log": ', "results.json is damaged"),
    ],
)
def test_a_folder_with_damaged_files_is_left_alone(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    out = tmp_path / "out"
    assert training.begin(out, {"lr": 1.0}) is None
    (out / name).write_text(content)
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(stages.UserError, match=message):
        training.begin(out, {"lr": 1.0})
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("model", ["albert", "low-rank"])
def test_accumulation_does_not_change_a_rival(model: str, data: Path, tmp_path: Path) -> None:
    """Not but for the mean over each micro-batch, whose number of masked tokens differs."""
    for micro in (8, 4):
        options = ("--steps", 2, "--batch", 8, "--micro-batch", micro)
        done = python(*command(data, tmp_path / str(micro), *options, model=model))
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "8"), rel=0.05)


def test_two_processes_do_the_same(data: Path, whole: Path, tmp_path: Path) -> None:
    """By torchrun; each takes one of the two parts of a batch."""
    out = tmp_path / "two"
    options = ("--steps", 6, "--batch", 8, "--micro-batch", 4)
    done = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *command(data, out, *options),
    )
    assert done.returncode == 0, done.stderr
    assert losses(out) == pytest.approx(losses(whole), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lr", -1), "--lr -1.0 must be more than 0"),
        (("--lr", "nan"), "--lr nan must be more than 0"),
        (("--seed", -1), "--seed -1 must be from 0"),
        (("--warmup", 2), "--warmup 2.0 is a share"),
        (("--batch", 9), "--batch 9 is no multiple of --micro-batch 4"),
        (("--table-gradient", 3), "table_gradient=3.0 is out of range"),
        (("--data", "nowhere"), "run prepare.py first"),
    ],
)
def test_bad_options(options: tuple, message: str, data: Path, tmp_path: Path) -> None:
    done = run(data, tmp_path / "out", *options)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("pretrain.py: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_table_gradient_of_what_shares_nothing(data: Path, tmp_path: Path) -> None:
    done = python(*command(data, tmp_path / "out", "--table-gradient", 0.1, model="albert"))
    assert done.returncode == 1
    assert "--table-gradient is not for albert" in done.stderr


def test_a_folder_in_use(data: Path, tmp_path: Path) -> None:
    """Two commands for one folder: the second one says so, the first one ends well."""
    out = tmp_path / "both"
    options = ("--steps", 6, "--batch", 8, "--micro-batch", 4)
    first = subprocess.Popen([sys.executable, *command(data, out, *options)], stdout=-3, stderr=-3)
    while not (out / ".lock").exists():
        assert first.poll() is None
        time.sleep(0.01)
    second = training.begin
    with pytest.raises(training.UserError, match="another process is training"):
        second(out, json.loads((out / "settings.json").read_text()))
    assert first.wait() == 0
    assert (out / "results.json").exists()
    assert not (out / ".lock").exists()


def test_an_unknown_model(data: Path, tmp_path: Path) -> None:
    done = python(*command(data, tmp_path / "out", model="huge"))
    assert done.returncode == 1
    assert "model 'huge' is unknown: use one of small, base" in done.stderr


# ---------------------------------------------------------------------- the comparison


def test_compare(data: Path, tmp_path: Path) -> None:
    """Two models from probes to table; again without work; and what was interrupted goes on."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "README.md").write_text("Before.\n<!-- results -->\n<!-- end -->\nAfter.\n")
    script = RECIPES / "bert_mlm" / "compare.py"
    options = ("--data", data, "--out", tmp_path / "models", "--results", results)
    options += ("--steps", 2, "--probe-steps", 1, "--models", "share-half-depth", "albert")
    done = python(script, *options)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (results / "results.jsonl").read_text().splitlines()]
    probes = (results / "probes.jsonl").read_text().splitlines()
    assert [(row["model"], row["seed"]) for row in rows] == [("share-half-depth", 1), ("albert", 1)]
    assert len(probes) >= 8  # three rates of each, and two more table gradients
    check(rows, probes)
    text = (results / "README.md").read_text()
    assert text.startswith("Before.\n<!-- results -->\n| model |")
    assert text.endswith("<!-- end -->\nAfter.\n")
    assert f"| {rows[0]['stored']:,} |" in text
    assert (results / "results.png").stat().st_size > 5000

    again = python(script, *options)
    assert again.returncode == 0, again.stderr
    assert "pretrain.py" not in again.stdout
    assert (results / "README.md").read_text() == text

    # Of other steps, or other data, there is nothing yet.
    other = shutil.copytree(data, tmp_path / "other")
    blocks = np.load(other / "blocks/dev.npy")
    np.save(other / "blocks/dev.npy", blocks[:-1])
    for more in (("--steps", 3), ("--data", other)):
        none = python(script, *options, "--show", *more)
        assert none.returncode == 1
        assert "has no lines of this yet" in none.stderr
    (other / "words/simlex999.txt").unlink()
    missing = python(script, *options, "--data", other)
    assert missing.returncode == 1
    assert "simlex999.txt is not there" in missing.stderr


def check(rows: list[dict[str, Any]], probes: list[str]) -> None:
    best = {}
    for probe in map(json.loads, probes):
        if probe["mlm_loss"] < best.get(probe["model"], {"mlm_loss": 99})["mlm_loss"]:
            best[probe["model"]] = probe
    for row in rows:
        probed = best["share" if row["model"].startswith("share") else row["model"]]
        assert (row["lr"], row["table_gradient"]) == (probed["lr"], probed["table_gradient"])
        assert 0 < row["mlm_loss"] < 10
        assert len(row["finetuned"]) == 2
        assert all(0 <= accuracy <= 100 for accuracy in row["finetuned"])
        assert row["operations"] > 2 * row["stored"]
