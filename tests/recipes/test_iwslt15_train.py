"""The recipe's training, scoring, comparison and demo, on a made-up corpus."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import string
import sys
from pathlib import Path

import pytest
import torch
from commands import python
from loading import RECIPES, load, within

pytest.importorskip("fairseq")
pytest.importorskip("sentencepiece")

RECIPE = RECIPES / "iwslt15_envi"


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
    assert "fairseq_cli.interactive" in done.stdout
    assert re.search(r"nrefs:1\|.*\|version:", done.stdout)


def test_scoring_without_a_model_or_a_test_set(demo, tmp_path: Path) -> None:
    done = script("score.py", tmp_path)
    assert done.returncode == 2
    assert f"there is no {tmp_path}/checkpoint_best.pt; train it first" in done.stderr
    out, _ = demo
    done = script("score.py", out / "veps", "--data", out / "data", "--test", tmp_path)
    assert done.returncode == 2
    assert "there is no tst2013.en" in done.stderr


def test_averaging_explains_itself(
    demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/tasks/test_translation_commands.py has averages that are made."""
    out, _ = demo
    veps, other = (out / model / "checkpoint_best.pt" for model in ("veps", "baseline"))
    mean = tmp_path / "mean.pt"
    for paths, message in (
        ([veps], "give at least two checkpoints"),
        ([veps, tmp_path / "none.pt"], f"there is no {tmp_path}/none.pt"),
        ([veps, other], f"{other} is of another model than {veps}: other names or shapes"),
    ):
        with within("iwslt15_envi"):
            import average

            assert average.main([*map(str, paths), "--out", str(mean)]) == 1
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_training_prints_its_command_and_passes_options_on(demo, tmp_path: Path) -> None:
    out, _ = demo
    done = script(
        *("train.py", "transformer", "veps", "--size", "small", "--data", out / "data" / "bin"),
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
        (["lstm", "veps"], "say when to stop: --updates or --minutes"),
        (["lstm", "veps", "--data", "nowhere"], "run recipes/iwslt15_envi/prepare.py"),
        (["lstm", "other", "--updates", "1"], "invalid choice: 'other'"),
        (["lstm", "veps", "--size", "demo"], "lstm has no size demo; use compare, paper"),
    ],
)
def test_training_explains_itself(arguments, message: str, demo) -> None:
    out, _ = demo
    if "--data" not in arguments:
        arguments = [*arguments, "--data", out / "data" / "bin"]
    done = script("train.py", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_training_goes_on_with_the_same_settings_alone(tmp_path: Path) -> None:
    with within("iwslt15_envi"):
        import train

    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()

    def claim(**how: object) -> str | None:
        run = train.command("lstm", "veps", "compare", data, out, **how)
        return train.claim(out, run, data)

    assert claim(updates=10) is None
    assert claim(updates=10, seed=2) is None  # nothing was saved
    torch.save({}, out / "checkpoint_last.pt")
    assert claim(updates=20, seed=2) is None
    assert claim(minutes=5, seed=2) is None
    assert claim(updates=20) == "--seed 1, --seed 2"
    assert claim(updates=20, seed=2, extra=("--share-depth", "none")) == "--share-depth none"
    (data / "stamp.json").write_text("{}")
    assert claim(updates=20, seed=2) == "other data"
    (out / "settings.json").unlink()
    assert claim(updates=20, seed=2) == "no settings.json says which"
    assert [path.name for path in out.iterdir()] == ["checkpoint_last.pt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("checkpoint_last.pt", b"", "checkpoint_last.pt is no whole checkpoint: it is empty; nor "),
        ("settings.json", b'{"options": [', "settings.json is damaged: Expecting value: line 1"),
        ("settings.json", b"\xff", "settings.json is damaged: no UTF-8 text at byte 0"),
        ("settings.json", b"[" * 100_000, "settings.json is damaged: maximum recursion depth"),
        ("settings.json", b"[]", r"settings.json is damaged: \[\] is no object"),
        ("settings.json", b'{"options": []}', "settings.json has no 'data'"),
        ("settings.json", b'{"options": [1]}', r"options is \[1\], not of type list\[str\]"),
    ],
)
def test_training_does_not_go_on_from_damaged_files(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    train, stages = load("iwslt15_envi", "train", "stages")
    run = train.command("lstm", "veps", "compare", tmp_path, tmp_path)
    assert train.claim(tmp_path, run, tmp_path) is None
    torch.save({}, tmp_path / "checkpoint_last.pt")
    (tmp_path / name).write_bytes(content)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(stages.UserError, match=message):
        train.claim(tmp_path, run, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_damaged_checkpoints_are_not_scored_or_averaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score, average, stages = load("iwslt15_envi", "score", "average", "stages")
    best = tmp_path / "checkpoint_best.pt"
    best.write_bytes(b"PK\x03\x04")
    message = f"{best} is no whole checkpoint: it breaks off"
    with pytest.raises(stages.UserError, match=message):
        score.score(tmp_path, tmp_path)
    with within("iwslt15_envi"):
        assert average.main([str(best), str(best)]) == 1
    assert message in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [best]


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


# ---------------------------------------------------------------------- the comparison

# Of every size, so that only its name and the width of its feed-forward are left.
TINY = [
    f"--{side}-{what}"
    for side in ("encoder", "decoder")
    for what in ("layers=1", "embed-dim=32", "attention-heads=2")
] + ["--num-workers=0"]


def compare(data: Path, results: Path, *more: object, **settings: object) -> int:
    """compare.py with other settings of its own."""
    with within("iwslt15_envi"), pytest.MonkeyPatch.context() as patch:
        import compare
        import comparison

        for name, value in settings.items():
            patch.setattr(comparison, name, value)
        return compare.main(["--data", str(data), "--results", str(results), *map(str, more)])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf8").splitlines()]


def test_comparing_transformers(
    demo,
    files: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of the models, one rate, one seed, twenty updates; the second command scores the talks
    and trains nothing."""
    data, results = demo[0] / "data", tmp_path / "results"
    results.mkdir()
    (results / "README.md").write_text("before\n<!-- results -->\n<!-- end -->\nafter\n")
    with within("iwslt15_envi"):
        from comparison import Comparison, Model, Plan

    names = ("baseline", "eps", "fairseq")
    models = [Model("transformer", name, "compare") for name in names]
    monkeypatch.setattr(Comparison, "models", lambda self, eps_size: models)
    how = {"SEEDS": {}, "PLANS": {"compare": {"transformer": Plan(1000, 5, 10, 20, (1e-3,))}}}
    arguments = [data, results, "--archs", "transformer", "--jobs", 2, *TINY]
    assert compare(*arguments, **how) == 0
    printed = capfd.readouterr().out
    assert printed.count("fairseq_cli.train") == 2 + 3  # probes, which go on, and fairseq's task
    assert len(lines(results / "rates.jsonl")) == 2
    rows = lines(results / "results.jsonl")
    found = {row["model"]: row for row in rows}
    assert sorted(found) == sorted(names)
    plain, alone = found["baseline"], found["fairseq"]
    # Trained in two parts, and at once; by both tasks.
    for name in ("stored", "dev_perplexity", "bleu", "chrf"):
        assert plain[name] == alone[name]
    assert plain["stored"] > found["eps"]["stored"]
    assert all("talks" not in row for row in rows)

    assert compare(*arguments, "--test", files, **how) == 0
    printed = capfd.readouterr().out
    assert "fairseq_cli.train" not in printed
    rows = lines(results / "results.jsonl")
    # Here the talks are the test set, but for what prepare.py does to both.
    assert [row["talks"] for row in rows] == [
        {name: row[name] for name in ("bleu", "chrf", "signatures")} for row in rows
    ]
    readme = (results / "README.md").read_text("utf8")
    assert readme.startswith("before\n<!-- results -->\n| model | stored | compression |")
    assert "| Transformer, plain, fairseq's task | " in readme
    assert readme.endswith("<!-- end -->\nafter\n")
    assert (results / "results.png").read_bytes().startswith(b"\x89PNG")

    # The command of a row trains the same model by hand, with as many threads: sums depend on it.
    command = shlex.split(alone["command"])
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = script(*command, "--data", data / "bin", "--out", tmp_path / "again", env=one)
    assert done.returncode == 0, done.stderr
    perplexities = re.findall(r"valid on .* ppl ([\d.]+)", done.stdout + done.stderr)
    assert float(perplexities[-1]) == alone["dev_perplexity"]


def test_eps_where_it_does_not_fit(
    demo, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the papers' sizes with 4,000 types; what would be trained is made up."""
    data = demo[0] / "data"
    trained = []
    with within("iwslt15_envi"):
        from comparison import PLANS, Comparison, Log, Model

    def train(self, model: Model, lr: float, seed: int, updates: int) -> Log:
        trained.append((*model[:3], lr, seed, updates))
        return Log(1000 if model.model == "eps" else 2000, 10 + abs(lr - 1e-3) + 5 / updates)

    def score(self, model: Model, out: Path, talks: Path | None = None) -> dict:
        return {"bleu": 20.0 if model.size == "paper" else 10.0, "chrf": 30.0, "signatures": []}

    monkeypatch.setattr(Comparison, "train", train)
    monkeypatch.setattr(Comparison, "score", score)
    arguments = [data, tmp_path, "--size", "paper", "--archs", "transformer", "fconv"]
    assert compare(*arguments) == 0
    printed = capfd.readouterr().out
    said = re.search(r"^transformer, paper: EPS needs (\d+) columns, the table has 512: ", printed)
    assert said
    assert f"{int(said[1]) - 512} are missing; its size is compare\n" in printed
    assert "fconv, paper" not in printed
    plan = PLANS["paper"]["transformer"]  # and of fconv
    probes = [run for run in trained if run[-1] == plan.probe]
    runs = [run for run in trained if run[-1] == plan.updates]
    assert len(probes) == 3 * (5 + 3)
    assert {run[3] for run in runs} == {1e-3}
    wanted = [
        *(("transformer", model, "paper") for model in ("baseline", "veps", "fairseq")),
        *(("transformer", model, "compare") for model in ("baseline", "eps")),
        *(("transformer", "veps", "paper-wide"),),
        *(("fconv", model, "paper") for model in ("baseline", "veps", "eps")),
    ]
    assert sorted({run[:3] for run in runs}) == sorted(wanted)
    twice = [run[:3] for run in runs if run[4] == 2]
    assert sorted(twice) == sorted(
        run for run in wanted if run[1] in ("baseline", "veps") and not run[2].endswith("wide")
    )
    table = printed[printed.index("| model | stored") :].splitlines()
    assert len(table) == 2 + len(wanted)
    (eps,) = [line for line in table if line.startswith("| Transformer, EPS |")]
    assert "| 1,000 | 2.00x | 0.001 | 1 |" in eps
    assert "| 100% |" in eps  # of the twin at its own size

    trained.clear()
    assert compare(*arguments) == 0
    assert trained == []
    assert compare(data, tmp_path, "--show", "--size", "paper") == 0
    assert capfd.readouterr().out.splitlines()[-len(table) :] == table


def test_trainings_that_diverge(
    demo, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are lines, so that they are not made again, and do not keep others from being made."""
    with within("iwslt15_envi"):
        from compare import parse
        from comparison import Comparison, Model

    diverging = [sys.executable, "-c", "raise FloatingPointError('gradients are Nan/Inf')"]
    monkeypatch.setattr(Comparison, "command", lambda *args: diverging)
    for trained in (9 + 5, 0):
        assert compare(demo[0] / "data", tmp_path, "--archs", "lstm") == 0
        printed = capfd.readouterr().out
        assert printed.count("FloatingPointError") == trained
        assert "| LSTM, VEPS |  |  | 0.006 |  | diverged |" in printed
    probes, runs = lines(tmp_path / "rates.jsonl"), lines(tmp_path / "results.jsonl")
    assert [line["dev_perplexity"] for line in (*probes, *runs)] == [None] * 14
    assert not (tmp_path / "results.png").exists()

    comparison = Comparison(parse(["--data", str(demo[0] / "data"), "--results", str(tmp_path)]))
    probes = [row for row in comparison.lines["rates.jsonl"] if row["model"] == "veps"]
    probes[1]["dev_perplexity"] = 500.0
    assert comparison.rate(Model("lstm", "veps", "compare")) == probes[1]["lr"]


def test_trying_changes(
    demo, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained is made up."""
    trained = []
    with within("iwslt15_envi"):
        import tries
        from comparison import PLANS, Comparison, Diverged, Log, Model

    def train(self, model: Model, lr: float, seed: int, updates: int) -> Log:
        trained.append((model.model, model.change, lr, seed, updates))
        if model.change == "--share-table-gradient 1":
            raise Diverged("diverged")
        return Log(1000, 20 - 5 * ("none" in model.change) - updates / 1000)

    def score(self, model: Model, out: Path, talks: Path | None = None) -> dict:
        return {"bleu": 9.0 if model.change else 10.0, "chrf": 30.0}

    monkeypatch.setattr(Comparison, "train", train)
    monkeypatch.setattr(Comparison, "score", score)
    (tmp_path / "README.md").write_text(
        "<!-- tries -->\n<!-- end -->\n<!-- results --><!-- end -->"
    )
    arguments = ["--data", str(demo[0] / "data"), "--results", str(tmp_path), "--archs", "fconv"]

    def try_all(*more: str) -> int:
        trained.clear()
        with within("iwslt15_envi"):
            return tries.main([*arguments, *more])

    assert try_all() == 1
    assert "fconv: run compare.py first" in capfd.readouterr().err
    assert try_all("--size", "paper") == 1
    assert "--size paper: what is tried here" in capfd.readouterr().err
    assert compare(demo[0] / "data", tmp_path, "--archs", "fconv") == 0
    assert try_all() == 0
    plan = PLANS["compare"]["fconv"]
    lr = min(plan.rates)
    probes = [("veps", change, lr, 1, plan.probe) for change in tries.PROBED["fconv"]]
    narrower = tries.NARROWER["fconv"]
    wholes = [
        ("baseline", narrower, lr, 1, plan.updates),
        *(("veps", change, lr, 1, plan.updates) for change in tries.WHOLE["fconv"]),
    ]
    assert sorted(trained[: len(probes)]) == sorted(probes)
    assert sorted(trained[len(probes) :]) == sorted(wholes)
    readme = (tmp_path / "README.md").read_text("utf8")
    assert readme.startswith("<!-- tries -->\n| model | change |")
    table = readme.splitlines()[3:]
    table = table[: table.index("<!-- end -->")]
    assert table[:7] == [
        "| ConvS2S, plain |  | 1,000 | 400 | 19.60 |  |  |  |",
        "| ConvS2S, plain |  | 1,000 | 1,200 | 18.80 | 10.0 | 30.0 |  |",
        f"| ConvS2S, plain | `{narrower}` | 1,000 | 1,200 | 18.80 | 9.0 | 30.0 | 90% |",
        "| ConvS2S, VEPS |  | 1,000 | 400 | 19.60 |  |  |  |",
        "| ConvS2S, VEPS |  | 1,000 | 1,200 | 18.80 | 10.0 | 30.0 | 100% |",
        "| ConvS2S, VEPS | `--share-table-gradient 0.01` | 1,000 | 400 | 19.60 |  |  |  |",
        "| ConvS2S, VEPS | `--share-table-gradient 1` |  | 400 | diverged |  |  |  |",
    ]
    whole = "| ConvS2S, VEPS | `--share-depth none` | 1,000 | 1,200 | 13.80 | 9.0 | 30.0 | 90% |"
    assert table[-2] == whole
    assert table[-1].endswith("embed-dim 192` | 1,000 | 1,200 | 18.80 | 9.0 | 30.0 | 90% |")
    assert len(table) == 4 + len(probes) + len(wholes)

    assert try_all() == 0
    assert trained == []

    # More updates, also of what has no change; or fewer, below the probes of another architecture.
    assert try_all("--updates", "600") == 0
    assert "| ConvS2S, plain |  | 1,000 | 600 | 19.40 | 10.0 | 30.0 |  |" in (
        tmp_path / "README.md"
    ).read_text("utf8")
    assert try_all("--updates", "5000") == 0
    more = [("baseline", change, lr, 1, 5000) for change in ("", narrower)]
    more += [("veps", change, lr, 1, 5000) for change in ("", *tries.WHOLE["fconv"])]
    assert sorted(trained) == sorted(more)
    assert "| ConvS2S, plain |  | 1,000 | 5,000 | 15.00 | 10.0 | 30.0 |  |" in (
        tmp_path / "README.md"
    ).read_text("utf8")
    assert try_all("--updates", "5000") == 0
    assert trained == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--show"], "has no lines of this data"),
        (["--updates", "400"], "more than 800, a probe's"),
        (["--test", "nowhere"], "there is no tst2013.en"),
    ],
)
def test_comparing_explains_itself(
    arguments: list[str], message: str, demo, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert compare(demo[0] / "data", tmp_path, *arguments) == 1
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("results.jsonl", '{"arch"', "results.jsonl, line 2 is damaged: Expecting ':'"),
        ("rates.jsonl", "7", "rates.jsonl, line 2 is damaged: 7 is no object"),
        ("rates.jsonl", "[" * 100_000, "rates.jsonl, line 2 is damaged: maximum recursion depth"),
        ("results.jsonl", {"bleu": "x"}, "results.jsonl, line 2: bleu is 'x', not of type int | f"),
        (
            "results.jsonl",
            {"talks": {"chrf": []}},
            "results.jsonl, line 2: chrf is [], not of type",
        ),
        ("results.jsonl", {"lr": None}, "results.jsonl, line 2 has no 'lr'"),
        ("results.jsonl", {"stored": None}, "results.jsonl, line 2 has no 'stored'"),
    ],
)
def test_damaged_lines_are_named(
    name: str,
    line: str | dict,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the recipe's own lines the second is changed; None takes a value away."""
    for path in ("results.jsonl", "rates.jsonl", "README.md"):
        (tmp_path / path).write_bytes((RECIPE / path).read_bytes())
    rows = (tmp_path / name).read_text("utf8").splitlines()
    if isinstance(line, dict):
        changed = {**json.loads(rows[1]), **line}
        line = json.dumps({key: value for key, value in changed.items() if value is not None})
    rows[1] = line
    (tmp_path / name).write_text("\n".join(rows) + "\n", "utf8")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    (data,) = {row["data"] for row in lines(RECIPE / "results.jsonl")}
    (comparison,) = load("iwslt15_envi", "comparison")
    monkeypatch.setattr(comparison, "data_digest", lambda folder: data)
    assert compare(RECIPE, tmp_path, "--show") == 1
    error = capsys.readouterr().err
    assert error.startswith("compare.py: ")
    assert error.count("\n") == 1
    assert message in error
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_sizes_are_what_the_readme_shows() -> None:
    readme = (RECIPE / "README.md").read_text("utf8")
    for types in (4000, 16000):
        done = script("sizes.py", "--types", types)
        assert done.returncode == 0, done.stderr
        assert done.stdout in readme


def test_the_table_is_made_of_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    (data,) = {row["data"] for row in lines(RECIPE / "results.jsonl")}
    with within("iwslt15_envi"):
        import compare
        import comparison
        import scoreboard
        import tries

        monkeypatch.setattr(comparison, "data_digest", lambda folder: data)
        arguments = ["--data", str(RECIPE), "--results", str(RECIPE)]
        made = comparison.Comparison(compare.parse(arguments))
        rows = made.shown()
        table = scoreboard.table(rows)
        tried = tries.Tries(made).table()
    assert len(rows) == 11
    readme = (RECIPE / "README.md").read_text("utf8")
    assert f"\n{table}\n" in readme
    assert f"\n{tried}\n" in readme
    plain, alone = (
        rows[comparison.Model("transformer", name, "compare")][0]
        for name in ("baseline", "fairseq")
    )
    for score in ("stored", "dev_perplexity", "bleu", "chrf", "talks"):
        assert alone[score] == plain[score]
