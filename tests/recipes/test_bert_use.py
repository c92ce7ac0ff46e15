"""Finetuning, evaluation and distillation of recipes/bert_mlm, on a tiny model and made-up data."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import python
from loading import RECIPES, load, within
from made_up import BAD, GOOD, OTHERS, write, write_jsonl
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

distill, evaluate, finetune, folders, script_module = load(
    "bert_mlm", "distill", "evaluate", "finetune", "folders", "script"
)
examples, masked, metrics, probing, vectors = load(
    "bert_mlm",
    "texts.examples",
    *(f"measures.{name}" for name in ("masked", "metrics", "probing", "vectors")),
)
of_labels, of_sentences, teaching = load(
    "bert_mlm", *(f"teachers.{name}" for name in ("labels", "sentences", "teaching"))
)


(eight_bits,) = load("bert_mlm", "int8")


@pytest.fixture(autouse=True)
def _scripts_find_their_modules() -> Iterator[None]:
    with within("bert_mlm"):
        yield


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny ShareBERT with its head for masked tokens."""
    from paramshare.models.sharebert_pretrained import ShareBertConfig, ShareBertForMaskedLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = ShareBertConfig(
        vocab_size=len(tokenizer),
        embedding_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
    )
    ShareBertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def teacher(model: Path, tokenizer, tmp_path: Path) -> Path:
    """A classifier of two labels."""
    return classifier(model, tokenizer, tmp_path / "teacher", ["0", "1"])


def classifier(model: Path, tokenizer, folder: Path, labels: list[str]) -> Path:
    import transformers

    names = dict(enumerate(labels))
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=len(labels), id2label=names, label2id={v: k for k, v in names.items()}
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def script(name: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess:
    return python(RECIPES / "bert_mlm" / name, *arguments, **options)


def files(data: Path, *splits: str) -> list[object]:
    return [x for split in splits for x in (f"--{split}", data / f"labelled/{split}.jsonl")]


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text("utf-8"))


def refused(capsys, run: Any, *arguments: object) -> str:
    """The message of a run that is refused: one line."""
    assert run.main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


# ---------------------------------------------------------------------- all scripts


@pytest.mark.parametrize("name", ["finetune.py", "evaluate.py", "distill.py"])
def test_help_needs_nothing_installed(name, tmp_path) -> None:
    """-S: without the installed packages."""
    shown = python("-S", RECIPES / "bert_mlm" / name, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "--seed" in shown.stdout or name != "finetune.py"
    arguments = {"finetune.py": ["M", "--out", "O"], "evaluate.py": ["M"]}
    given = arguments.get(name, ["sentences", "--out", tmp_path])
    done = python("-S", RECIPES / "bert_mlm" / name, *given)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name}: not installed: numpy, torch, transformers")
    assert done.stderr.count("\n") == 1


def test_what_an_interrupted_script_does_next(capsys) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert script_module.run_script("a.py", interrupted) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    assert script_module.run_script("a.py", interrupted, resumes=False) == 130
    assert "the same command starts again" in capsys.readouterr().err


# ---------------------------------------------------------------------- finetune


FAST = ("--epochs", 12, "--lr", 5e-3, "--warmup", 2, "--batch", 16)


def test_finetuning_learns_and_its_folder_serves(model, data, tmp_path) -> None:
    from transformers import pipeline

    out = tmp_path / "out"
    arguments = (model, *files(data, "train", "dev", "test"), "--out", out, *FAST)
    done = script("finetune.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert "train 96, dev 32, test 32; labels: 0 (48), 1 (48)" in done.stdout
    assert results(out)["test"]["accuracy"] > 90
    assert f"test: accuracy {results(out)['test']['accuracy']:.2f}" in done.stdout
    assert not (out / "checkpoints").exists()
    judge = pipeline("text-classification", str(out), device="cpu")
    assert [judge(f"the film is {word}")[0]["label"] for word in ("lovely", "awful")] == ["1", "0"]
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert finetune.main([str(x) for x in arguments]) == 0  # finished: says it again
    assert (out / "model.safetensors").stat().st_mtime_ns == before


def test_an_interrupted_finetuning_goes_on(model, data, tmp_path) -> None:
    """Killed in the middle, it ends as if it had not been."""
    ends = []
    for kill in (False, True):
        out = tmp_path / f"killed-{kill}"
        arguments = [model, *files(data, "train", "dev"), *FAST, "--save-every", 10, "--out", out]
        if kill:
            running = subprocess.Popen(
                list(map(str, [sys.executable, RECIPES / "bert_mlm/finetune.py", *arguments])),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while not list(out.glob("checkpoints/checkpoint-*")) and running.poll() is None:
                time.sleep(0.02)
            running.send_signal(signal.SIGKILL)
            running.wait()
            assert not (out / "results.json").exists()
        assert finetune.main(list(map(str, arguments))) == 0
        ends.append(load_file(out / "model.safetensors"))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor)


def test_a_folder_of_other_settings_is_not_gone_on_with(model, data, tmp_path, capsys) -> None:
    arguments = [model, *files(data, "train", "dev"), "--epochs", 1, "--out", tmp_path / "out"]
    assert finetune.main(list(map(str, arguments))) == 0
    capsys.readouterr()
    said = refused(capsys, finetune, *arguments, "--lr", 1e-3)
    assert "was begun with lr 5e-05, not 0.001" in said
    write(tmp_path / "other/file", "")
    said = refused(capsys, finetune, *arguments[:-1], tmp_path / "other")
    assert "is there already, and not this script's" in said


def load_examples(*arguments: object) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    examples.add_options(parser)
    return examples.load(parser.parse_args(list(map(str, arguments))))


def test_pairs_and_words_as_labels_from_csv(tmp_path) -> None:
    rows = [("a, b", "c", "yes"), ('say "no"', "d", "no"), ("e", "f", "yes")]
    with open(tmp_path / "train.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("text", "text2", "label"), *rows])
    found = load_examples("--train", tmp_path / "train.csv", "--dev", tmp_path / "train.csv")
    assert found.names == ["no", "yes"]
    assert found.splits["dev"][1] == (('say "no"', "d"), 0.0)
    assert "labels: no (1), yes (2)" in found.describe()


def test_one_label_however_it_is_written(tmp_path) -> None:
    """As a spreadsheet writes it, too: with spaces in the header, and a suffix in upper case."""
    train = write(tmp_path / "train.CSV", "text, label\na,0.0\nb, 1.0\n")
    dev = write(tmp_path / "dev.csv", "text,label\na,0\nb,1\n")
    found = load_examples("--train", train, "--dev", dev)
    assert found.names == ["0", "1"]
    assert found.splits["train"] == found.splits["dev"] == [(("a",), 0), (("b",), 1)]
    others = [{"text": "a", "label": label} for label in ("1.05", "1.10", "v1.0", "-2.00")]
    path = write_jsonl(tmp_path / "x.jsonl", others)
    found = load_examples("--train", path, "--dev", path)
    assert found.names == ["-2", "1.05", "1.10", "v1.0"]


def test_numbers_as_labels_are_in_their_order(tmp_path) -> None:
    rows = [{"text": "a", "label": label} for label in (10, 9.0, "9", 2)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    found = load_examples("--train", path, "--dev", path)
    assert found.names == ["2", "9", "10"]
    assert [example.label for example in found.splits["train"]] == [2, 1, 1, 0]


def test_regression(model, data, tmp_path) -> None:
    out = tmp_path / "out"
    arguments = [
        model,
        *files(data, "train", "dev"),
        "--regression",
        "--out",
        out,
        *FAST,
        "--epochs",
        24,
    ]
    assert finetune.main(list(map(str, arguments))) == 0
    assert results(out)["dev"]["pearson"] > 50
    assert json.loads((out / "config.json").read_text())["problem_type"] == "regression"


GLUE_TSV = {
    "CoLA": ("gj04\t1\t\tIt is.\n", "gj04\t0\t*\tIs it is.\n"),
    "MRPC": (
        'Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tHe said "x\t"He" said\n',
        "0\t7\t8\tOne\tTwo\n",
    ),
    "MNLI": (
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\ta\tb\tneutral\tneutral\n",
        "1\tc\td\tneutral\tentailment\n",
    ),
}


@pytest.mark.parametrize("name", GLUE_TSV)
def test_glue_of_its_archives(name, tmp_path) -> None:
    first, second = GLUE_TSV[name]
    write(tmp_path / name / "train.tsv", first + second)
    dev = "dev_matched.tsv" if name == "MNLI" else "dev.tsv"
    write(tmp_path / name / dev, first + second)
    write(tmp_path / name / "dev_mismatched.tsv", "")
    found = load_examples("--glue", name.lower(), "--glue-dir", tmp_path)
    expected = {
        "CoLA": [(("It is.",), 1), (("Is it is.",), 0)],
        "MRPC": [(('He said "x', '"He" said'), 1), (("One", "Two"), 0)],
        "MNLI": [(("a", "b"), 1), (("c", "d"), 0)],
    }
    assert found.splits["train"] == found.splits["dev"] == expected[name]


def test_rows_of_qqp_without_a_label_are_left_out(tmp_path, capsys) -> None:
    header = "id\tquestion1\tquestion2\tis_duplicate\n"
    write(tmp_path / "train.tsv", f"{header}0\ta\tb\t1\n1\tcut off\n2\tc\td\t\n3\te\tf\t0\n")
    write(tmp_path / "dev.tsv", f"{header}0\ta\tb\t1\n")
    arguments = ("--glue", "qqp", "--glue-dir", tmp_path)
    found = load_examples(*arguments)
    assert found.splits["train"] == [(("a", "b"), 1), (("e", "f"), 0)]
    assert "train 2, dev 1 (2 without a label are left out);" in found.describe()
    write(tmp_path / "dev.tsv", f"{header}0\ta\tb\t\n")
    with pytest.raises(examples.UserError, match=r"dev\.tsv: no row has a label"):
        load_examples(*arguments)


def test_glue_of_datasets(tmp_path) -> None:
    """JSON lines, and Parquet where pyarrow is installed."""
    rows = [{"sentence1": "a", "sentence2": "b", "label": 2.5, "idx": 0}]
    write_jsonl(tmp_path / "stsb/train.jsonl", rows)
    write_jsonl(tmp_path / "stsb/validation.jsonl", rows)
    found = load_examples("--glue", "stsb", "--glue-dir", tmp_path)
    assert found.names is None
    assert found.splits["dev"] == [(("a", "b"), 2.5)]
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for split in ("train", "validation"):
        path = tmp_path / f"other/stsb/{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    again = load_examples("--glue", "stsb", "--glue-dir", tmp_path / "other")
    assert again.splits == found.splits


def test_cola_as_the_paper_scores_it(tmp_path) -> None:
    rows = [{"sentence": "a", "label": 1}, {"sentence": "b", "label": 0}]
    for split in ("train", "validation"):
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    outputs, labels = np.eye(2)[[1, 1, 1, 0]], np.array([1, 1, 0, 0])
    arguments = ("--glue", "cola", "--glue-dir", tmp_path)
    assert load_examples(*arguments).measure(outputs, labels) == {
        "matthews": pytest.approx(100 / 3**0.5)
    }
    paper = load_examples(*arguments, "--cola-metric", "paper").measure(outputs, labels)
    assert paper == pytest.approx({"accuracy": 75, "f1": 80, "mean": 77.5})


def test_what_cannot_be_finetuned_on(model, data, tmp_path, capsys) -> None:
    """One line each, and nothing is written."""
    good = data / "labelled/train.jsonl"
    out = tmp_path / "out"

    def said(*arguments: object) -> str:
        message = refused(capsys, finetune, *arguments, "--out", out)
        assert not out.exists()
        return message

    def with_dev(text: str, name: str = "dev.jsonl") -> str:
        return said(model, "--train", good, "--dev", write(tmp_path / name, text))

    assert "has no column 'label': its columns are text" in with_dev('{"text": "a"}\n')
    assert "has no column 'text'" in with_dev("sentence,label\na,1\n", "dev.csv")
    assert "line 2 has 3 cell(s) for 2 columns" in with_dev("text,label\na, b,1\n", "dev.csv")
    assert "line 3 lacks the label" in with_dev("text,label\na,1\nb,\n", "dev.csv")
    assert "label '7' is in the dev texts, but not in the training" in with_dev(
        '{"text": "a", "label": 7}\n'
    )
    assert "text2 is a column of dev only" in with_dev('{"text":"a","text2":"b","label":0}\n')
    assert "has no rows" in with_dev("")
    assert "line 1 is not JSON" in with_dev("a\n")
    assert "rows are read from .jsonl, .csv" in with_dev("a", "dev.txt")
    assert "is not a file" in said(model, "--train", good, "--dev", tmp_path / "none.csv")
    if importlib.util.find_spec("pyarrow"):
        assert "dev.parquet is not a Parquet file" in with_dev("no " * 99, "dev.parquet")
    for labels in (range(20), (0.5, 1.5)):
        rows = [{"text": "a", "label": label} for label in labels]
        numbers = write_jsonl(tmp_path / "numbers.jsonl", rows)
        assert "to be predicted need --regression" in said(
            *(model, "--train", numbers, "--dev", write(tmp_path / "x.csv", "text,label\na,77\n"))
        )
    assert "--regression" not in with_dev('{"text": "a", "label": 7}\n')
    words = write_jsonl(tmp_path / "words.jsonl", [{"text": "a", "label": "good"}])
    assert "label 'good' is not a number" in said(
        model, "--train", words, "--dev", words, "--regression"
    )
    assert "all training texts have the same label, 'good'" in said(
        model, "--train", words, "--dev", words
    )
    both = ("--train", good, "--dev", good)
    assert "has no config.json" in said(tmp_path / "none", *both)
    assert "model takes inputs of 3 to 24 tokens" in said(model, *both, "--length", 25)
    assert "--batch 0 must be more than 0" in said(model, *both, "--batch", 0)
    assert "--seed -1 must be from 0" in said(model, *both, "--seed", -1)
    assert "--warmup -5 must be at least 0" in said(model, *both, "--warmup", -5)
    assert "GLUE has no task 'mmlu': use one of cola" in said(model, "--glue", "mmlu")
    assert "no train file of rte" in said(model, "--glue", "rte", "--glue-dir", tmp_path)
    write(tmp_path / "g/rte/train.jsonl", "")
    write(tmp_path / "g/dev.jsonl", "")
    assert "g/rte has no dev file of rte" in said(
        model, "--glue", "rte", "--glue-dir", tmp_path / "g"
    )
    assert "say what to train on" in said(model, "--train", good)
    assert "leave out --train" in said(model, "--glue", "rte", *both)


# ---------------------------------------------------------------------- metrics


def test_correlations_of_known_values() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert metrics.pearson(x, 2 * x + 1) == pytest.approx(100)
    assert metrics.spearman(x, -(x**3)) == pytest.approx(-100)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    tied = metrics.spearman(np.array([1, 2, 2, 3]), np.array([1, 2, 3, 4]))
    assert tied == pytest.approx(100 * 4.5 / (4.5 * 5) ** 0.5)
    assert metrics.pearson(np.ones(3), np.arange(3)) == 0


def test_agreement_of_known_values() -> None:
    # 6 true and 3 false positives, 1 false and 2 true negatives.
    labels = np.array([1] * 6 + [0] * 3 + [1] + [0] * 2)
    guesses = np.array([1] * 9 + [0] * 3)
    assert metrics.accuracy(guesses, labels) == pytest.approx(100 * 8 / 12)
    assert metrics.f1(guesses, labels) == pytest.approx(100 * 12 / 16)
    assert metrics.macro_f1(guesses, labels) == pytest.approx((100 * 12 / 16 + 100 * 4 / 8) / 2)
    expected = 100 * (6 * 2 - 3 * 1) / (9 * 7 * 5 * 3) ** 0.5
    assert metrics.matthews(guesses, labels) == pytest.approx(expected)
    assert metrics.matthews(np.ones(12), labels) == 0


# ---------------------------------------------------------------------- evaluate


def test_evaluation_of_two_models(model, data, tmp_path) -> None:
    """The same model twice: equal figures, equal profiles."""
    probes = probe_files(tmp_path)
    out = tmp_path / "figures.json"
    done = script("evaluate.py", model, model, "--data", data, "--probe", *probes, "--json", out)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text("utf-8"))[str(model)]
    # It knows nothing, and its logits are normal with a variance of 16 features x 0.2^2.
    assert figures["mlm"]["loss"] == pytest.approx(np.log(75) + 16 * 0.2**2 / 2, abs=0.1)
    assert figures["WordSim-353"]["single"] == 75
    assert figures["analogies"]["asked"] == pytest.approx(200 / 3)
    assert len(figures["probe"]["accuracy"]) == 3
    assert figures["probe"]["accuracy"][0] == 100
    for line in ("masked tokens: loss", "SimLex-999: Spearman, table", "probe of layer 2"):
        assert line in done.stdout
    assert "+1.000" in done.stdout or "+0.000" in done.stdout  # or all layers are as good


def test_classifiers_of_8_bits(model, teacher, tokenizer, data, tmp_path, capsys) -> None:
    arguments = [str(x) for x in (teacher, *files(data, "train", "dev", "test"))]
    assert eight_bits.main(arguments) == 0
    title, *table = capsys.readouterr().out.strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert title == str(teacher)
    assert cells[0][1] == "stored, MB"
    assert [row[0] for row in cells[2:]] == ["float32", "int8", "generated"]
    sizes = [float(row[1]) for row in cells[2:]]
    assert sizes[1] < sizes[0] == sizes[2]
    for exact, found in zip(cells[2][2::3], cells[3][2::3], strict=True):
        assert abs(float(exact) - float(found)) < 10
    assert all(0.99 < float(cell) <= 1 for row in cells[2:] for cell in row[4::3])
    other = classifier(model, tokenizer, tmp_path / "other", ["bad", "good"])
    message = refused(capsys, eight_bits, other, *files(data, "train", "dev"))
    assert "knows the labels bad, good, the data has 0, 1" in message


def load_encoder(folder: Path) -> Any:
    from transformers import AutoModel

    return folders.load_model(AutoModel, folder)


def test_masks_are_the_same_for_every_model(model, data, tokenizer) -> None:
    first = masked.score(model, tokenizer, data)
    torch.manual_seed(5)
    assert masked.score(model, tokenizer, data) == first
    assert 20 < first["masked"] < 70  # of 280


def test_similarity_of_a_model_that_agrees(model, tokenizer) -> None:
    """Ratings that are its own cosines."""
    words = vectors.Words(load_encoder(model), tokenizer)
    pairs = [(a, b) for a in GOOD for b in ("unheard", *OTHERS)]
    for kind in ("table", "alone"):
        x, y = (getattr(words, kind)([pair[n] for pair in pairs]) for n in (0, 1))
        ratings = torch.cosine_similarity(x, y).tolist()
        rated = [vectors.Pair(a, b, r) for (a, b), r in zip(pairs, ratings, strict=True)]
        found = vectors.similarity(words, rated)
        assert found[kind] == pytest.approx(100)
        assert found["single"] == pytest.approx(100 * 10 / 11)
    table = words.model.get_input_embeddings().weight
    pieces = tokenizer.convert_tokens_to_ids(["h", "##i"])
    torch.testing.assert_close(words.table(["hi"])[0], table[pieces].mean(0))


def test_analogies_of_constructed_vectors(tokenizer, model) -> None:
    """Unit vectors of two features that add up: bad - good + fine is poor."""
    from torch.nn import functional as F

    base = torch.eye(8)
    x = F.normalize(torch.stack([base[0], base[0] + base[7], base[1], base[1] + base[7], base[2]]))
    assert vectors.solve(x, torch.tensor([[0, 1, 2], [3, 2, 1]])).tolist() == [3, 0]
    # Nearest to b - a + c is c itself, which is no answer.
    assert vectors.solve(x, torch.tensor([[0, 0, 4]])).item() != 4

    network = load_encoder(model)
    table = network.get_input_embeddings().weight
    with torch.no_grad():
        for number, (good, bad) in enumerate(zip(GOOD, BAD, strict=True)):
            for word, tail in ((good, 0.0), (bad, 1.0)):
                table[tokenizer.convert_tokens_to_ids(word)] = 5 * base[number].repeat(2)
                table[tokenizer.convert_tokens_to_ids(word), -1] = 5 * tail
    words = vectors.Words(network, tokenizer)
    questions = [
        ("Good", "bad", "fine", "poor"),
        ("good", "bad", "fine", "ugly"),
        ("a", "b", "c", "zz"),
    ]
    found = vectors.analogies(words, questions)
    assert found == {"accuracy": 50, "asked": pytest.approx(200 / 3)}


def test_analogies_that_cannot_be_asked(model, data, tmp_path, capsys) -> None:
    """Have no accuracy; spaces in --only do no harm."""
    write(tmp_path / "words/questions-words.txt", "unheard of such words\n")
    for file in evaluate.SIMILARITIES.values():
        write(tmp_path / "words" / file, (data / "words" / file).read_text("utf-8"))
    arguments = (model, "--data", tmp_path, "--only", "words, analogies", "--json")
    assert evaluate.main(list(map(str, (*arguments, tmp_path / "figures.json")))) == 0
    figures = json.loads((tmp_path / "figures.json").read_text("utf-8"))[str(model)]
    assert figures["analogies"] == {"accuracy": None, "asked": 0}
    assert re.search(r"analogies: accuracy, % +-\n", capsys.readouterr().out)


def probe_files(folder: Path) -> list[Path]:
    """The label is the word of the span."""
    paths = []
    for split, count in (("train", 60), ("test", 20)):
        draw = random.Random(split)
        rows = []
        for _ in range(count):
            words = draw.choices(["good", "bad", "king"], k=5)
            start = draw.randrange(5)
            target = {"span1": [start, start + 1], "label": words[start]}
            rows.append({"text": " ".join(words), "targets": [target]})
        paths.append(write_jsonl(folder / f"{split}.jsonl", rows))
    return paths


class Layers:
    """A model of three layers, of which the second alone tells words apart."""

    device = torch.device("cpu")

    def __call__(self, input_ids, output_hidden_states, **_: Any) -> Any:
        from types import SimpleNamespace

        noise = torch.Generator().manual_seed(int(input_ids.sum()))
        states = [torch.randn(*input_ids.shape, 8, generator=noise) for _ in range(4)]
        states[2][..., 0] += 20 * input_ids
        states[2][..., 1] += 20 * (input_ids - 10) ** 2
        return SimpleNamespace(hidden_states=states)


def test_the_probe_finds_the_layer(tokenizer, tmp_path) -> None:
    train, test = map(probing.read, probe_files(tmp_path))
    found = probing.profile(Layers(), tokenizer, 24, train, test)
    assert found.accuracy[2] == found.macro_f1[2] == 100
    assert max(found.accuracy[0], found.accuracy[1], found.accuracy[3]) < 75
    assert found.centre == pytest.approx(2, abs=0.5)
    assert found.left_out == 0
    beyond = probing.profile(Layers(), tokenizer, 4, train, test)  # two words and the ends
    assert 0 < beyond.left_out < 80


def test_profiles_of_unlike_depth() -> None:
    assert probing.correlation([1, 3, 2], [10, 30, 20]) == pytest.approx(100)
    assert probing.correlation([1, 2, 3], [1, 1.5, 2, 2.5, 3]) == pytest.approx(100)
    assert probing.correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-100)


def test_what_cannot_be_evaluated(model, teacher, data, tmp_path, capsys) -> None:
    def said(*arguments: object) -> str:
        return refused(capsys, evaluate, *arguments)

    assert "has no config.json" in said(tmp_path)
    assert "there is no such measure" in said(model, "--only", "mlm,bleu")
    nowhere = tmp_path / "none/figures.json"
    assert f"there is no folder {nowhere.parent}" in said(tmp_path, "--json", nowhere)
    assert "is a folder" in said(tmp_path, "--json", tmp_path)
    assert "needs the data: --probe" in said(model, "--only", "probe")
    assert "no output layer for masked tokens" in said(teacher, "--data", data, "--only", "mlm")
    assert "wordsim353.tsv is not there" in said(model, "--data", tmp_path, "--only", "words")
    assert "holds no tokenizer" in said(model, "--data", tmp_path, "--only", "mlm")

    def probed(**target: Any) -> str:
        path = write_jsonl(tmp_path / "p.jsonl", [{"text": "a b c", "targets": [target]}])
        return said(model, "--only", "probe", "--probe", path, path)

    assert "line 1 has the span [1, 4], but 3 words" in probed(span1=[1, 4], label="x")
    assert "line 1 has the span [1, 1]" in probed(span1=[1, 1], label="x")
    assert 'line 1 is not {"text": ...' in probed(span1=[1, 2])
    assert 'line 1 is not {"text": ...' in probed(span1=3, label="x")
    train, test = probe_files(tmp_path)
    new = {"text": "a", "targets": [{"span1": [0, 1], "label": "new"}]}
    test = write_jsonl(tmp_path / "new.jsonl", [new])
    assert "label 'new' is not in the training file" in said(model, "--probe", train, test)


# ---------------------------------------------------------------------- distill


def test_a_student_of_a_classifier(model, teacher, data, tmp_path) -> None:
    """It learns to say what its teacher says, however wrong that is."""
    from transformers import AutoModelForSequenceClassification as Auto

    out, cache = tmp_path / "out", tmp_path / "cache"
    done = script(
        *("distill.py", "classify", teacher, model, "--out", out, "--cache", cache),
        *(*files(data, "train", "dev"), *FAST, "--hard", 0, "--loss", "kl"),
    )
    assert done.returncode == 0, done.stderr
    assert len(list(cache.iterdir())) == 1
    assert results(out)["dev"].keys() == {"accuracy", "macro_f1"}
    expected, found = (
        of_labels.Teacher(folder, ["0", "1"]).logits([("the king is good",), ("a bad film",)])
        for folder in (teacher, out)
    )
    softmax = (torch.from_numpy(x).softmax(-1) for x in (found, expected))
    torch.testing.assert_close(*softmax, atol=0.1, rtol=0)
    assert Auto.from_pretrained(out).config.id2label == {0: "0", 1: "1"}


def test_losses_of_known_values() -> None:
    logits, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
    labels = torch.tensor([1])
    mse = of_labels.loss("mse", 2.0, 0.25, False)(logits, labels, teacher)
    assert mse.item() == pytest.approx(0.25 * np.log(2) + 0.75 * 2)
    kl = of_labels.loss("kl", 2.0, 0.0, False)(logits, labels, teacher)
    p = 1 / (1 + np.exp(-1))
    assert kl.item() == pytest.approx(4 * (np.log(2) + p * np.log(p) + (1 - p) * np.log(1 - p)))


@pytest.fixture(scope="module")
def small_teacher(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT, as MiniLM is one."""
    import transformers

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=24,
    )
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SIZES = (
    *("--embedding-size", 12, "--hidden-size", 24, "--intermediate-size", 32, "--layers", 2),
    *("--heads", 2, "--batch", 16, "--epochs", 12, "--warmup", 5, "--lr", 1e-2),
)


@pytest.mark.parametrize("student", ["share", "albert"])
def test_a_student_of_sentences(student, small_teacher, data, tmp_path) -> None:
    from transformers import AutoModel, AutoTokenizer

    out, cache = tmp_path / "out", tmp_path / "cache"
    options = ("--data", data, "--cache", cache, "--hidden-weight", 0.5, *SIZES)
    arguments = ("sentences", "--out", out, "--teacher", small_teacher, "--student", student)
    assert distill.main([str(x) for x in (*arguments, *options)]) == 0
    found = results(out)
    assert found["cosine"] > 0.8
    assert found["steps"] == 12 * 6
    model, tokenizer = AutoModel.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert found["parameters"] == model.num_parameters()
    sentences = (data / "sentences/dev.txt").read_text().splitlines()
    again = [
        of_sentences.encode(network, tokenizer, sentences, 24)
        for network in (model, AutoModel.from_pretrained(small_teacher))
    ]
    assert of_sentences.compare(*again)["cosine"] == pytest.approx(found["cosine"], abs=1e-3)


def test_a_warm_student_has_its_teachers_words(small_teacher, tokenizer) -> None:
    """Exactly, where the student's features are enough for them."""
    import argparse

    from transformers import AutoModel

    teacher = AutoModel.from_pretrained(small_teacher)
    known = teacher.get_input_embeddings().weight
    with torch.no_grad():
        known[:, 12:] = known[:, :4] + 1
    sizes = {"embedding_size": 13, "hidden_size": 24, "intermediate_size": 32}
    for kind in ("share", "albert"):
        args = argparse.Namespace(student=kind, cold=False, layers=1, heads=2, **sizes)
        student = of_sentences.build(args, teacher, tokenizer, 24)
        if kind == "share":
            parts = student.bert.embeddings
            lifted = parts.lift(parts.tokens.weight) + parts.types.weight[0]
        else:
            parts = student.embeddings
            rows = parts.word_embeddings.weight + parts.token_type_embeddings.weight[0]
            lifted = student.encoder.embedding_hidden_mapping_in(rows)
        torch.testing.assert_close(lifted[:, :16], known, atol=1e-5, rtol=0)


def test_too_few_sentences_to_be_ranked(small_teacher, data, tmp_path, recwarn, capsys) -> None:
    for split in ("train", "dev"):
        write(tmp_path / f"sentences/{split}.txt", "the king is good\n")
    options = ("--data", tmp_path, "--cache", tmp_path / "cache", "--out", tmp_path / "out")
    arguments = ("sentences", "--teacher", small_teacher, *options, *SIZES, "--epochs", 1)
    assert distill.main(list(map(str, arguments))) == 0
    assert "rank correlation of similarities needs 3 sentences or more" in capsys.readouterr().out
    assert results(tmp_path / "out")["ranks"] is None
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]
    rows = np.eye(3, 4)
    assert of_sentences.compare(rows[:2], rows[:2])["ranks"] is None
    assert of_sentences.compare(rows, rows)["ranks"] is not None


def test_what_a_teacher_said_is_kept(tmp_path, capsys) -> None:
    asked = []

    def compute(part: Any) -> np.ndarray:
        asked.append(len(part))
        return np.array([[len(text)] for (text,) in part], np.float32)

    many = [("x" * (n % 50),) for n in range(teaching.PART + 10)]
    key = teaching.Key("logits", "teacher", 24)
    for _ in range(2):
        found = teaching.outputs(many, compute, key, tmp_path)
        assert found[:, 0].tolist() == [n % 50 for n in range(len(many))]
    assert asked == [teaching.PART, 10]
    teaching.outputs(many[: teaching.PART], compute, key, tmp_path)
    assert len(asked) == 2
    others = {"kind": "vectors", "teacher": "other", "length": 23}
    for number, (name, value) in enumerate(others.items(), 3):
        teaching.outputs(many[:5], compute, key._replace(**{name: value}), tmp_path)
        assert len(asked) == number
    assert "the teacher has read 2,000 of 2,010 texts" in capsys.readouterr().out


def test_what_cannot_be_distilled(
    model, teacher, small_teacher, tokenizer, data, tmp_path, capsys
) -> None:
    out = tmp_path / "out"

    def said(*arguments: object) -> str:
        cache = tmp_path / "cache"
        message = refused(capsys, distill, *arguments, "--out", out, "--cache", cache)
        assert not out.exists()
        assert not cache.exists()
        return message

    both = files(data, "train", "dev")
    other = classifier(model, tokenizer, tmp_path / "other", ["no", "yes"])
    assert "knows no, yes, the texts have 0, 1" in said("classify", other, model, *both)
    assert "has no config.json" in said("classify", teacher, tmp_path, *both)
    assert "--hard 2.0 is a weight" in said("classify", teacher, model, *both, "--hard", 2)
    assert "predicted numbers need --loss mse" in said(
        "classify", teacher, model, *both, "--regression", "--loss", "kl"
    )
    common = ("sentences", "--teacher", small_teacher)
    assert "train.txt is not there" in said(*common, "--data", tmp_path)
    assert "--hidden-size 8 is less than the teacher's 16" in said(
        *common, "--data", data, "--hidden-size", 8, "--heads", 2
    )
    assert "--embedding-size 16 must be less than the teacher's 16" in said(
        *common, "--data", data, "--embedding-size", 16
    )
    common = (*common, "--embedding-size", 8)
    assert "the student cannot be built: hidden_size=384 is no multiple" in said(
        *common, "--data", data, "--heads", 7
    )
