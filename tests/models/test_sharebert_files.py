"""Files that are damaged or made up: one error each, at once, and nothing is run or written."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from released import folder_of
from torch import nn

pytest.importorskip("transformers")

from paramshare import ShareError
from paramshare.models import sharebert
from paramshare.models.sharebert_fairseq import export_sharebert, fill_from
from paramshare.models.sharebert_files import read_json, read_pickle
from paramshare.models.sharebert_pretrained import ShareBertConfig, ShareBertForMaskedLM
from paramshare.models.sharebert_released import import_sharebert

HUGE = 10**12


class Source:
    """A ShareBERT in the files of the released code."""

    table, norm = "bert.embeddings.word_embeddings.weight", "bert.encoder.FinalLayerNorm.weight"
    features = "factor_size"

    def __init__(self, place: Path) -> None:
        self.out = place / "out"
        self.folder = folder_of("A", place / "theirs")
        self.options: Any = json.loads((self.folder / "config.json").read_text())
        self.tensors: Any = read_pickle(self.folder / "pytorch_model.bin")

    @property
    def weights(self) -> Path:
        return self.folder / "pytorch_model.bin"

    def write(self) -> None:
        (self.folder / "config.json").write_text(json.dumps(self.options))
        torch.save(self.tensors, self.weights)

    def convert(self) -> nn.Module:
        return import_sharebert(self.folder, self.out)

    def fails(self, message: str) -> None:
        files = sorted(self.folder.parent.rglob("*"))
        begin = time.monotonic()
        with pytest.raises(ShareError, match=message) as error:
            self.convert()
        assert time.monotonic() - begin < 3  # of which it takes a tenth, on an idle machine
        assert "\n" not in str(error.value)
        assert sorted(self.folder.parent.rglob("*")) == files


class Checkpoint(Source):
    """A ShareBERT in a checkpoint of fairseq-train."""

    table, norm, features = "bert.embeddings.tokens.weight", "bert.norm.weight", "embedding_size"

    def __init__(self, place: Path) -> None:
        self.out, self.folder = place / "out", place / "theirs"
        self.folder.mkdir()
        sizes = {"vocab_size": 200, "embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 2}
        sizes |= {"intermediate_size": 32, "num_attention_heads": 4, "max_position_embeddings": 12}
        config = sharebert.ShareBertConfig(**sizes)
        self.options = asdict(config)
        self.tensors = ShareBertForMaskedLM(ShareBertConfig(**self.options)).state_dict()

    @property
    def weights(self) -> Path:
        return self.folder / "checkpoint.pt"

    def write(self) -> None:
        task = {"data": "nowhere"}
        torch.save(
            {
                "task_state": {"sharebert": self.options},
                "model": self.tensors,
                "cfg": {"task": task},
            },
            self.weights,
        )

    def convert(self) -> nn.Module:
        return export_sharebert(self.weights, self.out)


@pytest.fixture(params=[Source, Checkpoint], ids=["released", "fairseq"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    made = request.param(tmp_path)
    made.write()
    return made


def test_what_is_whole_is_converted(source: Source) -> None:
    torch.testing.assert_close(
        source.convert().bert.embeddings.tokens.weight, source.tensors[source.table]
    )


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "name",
    [
        *("vocab_size", "features", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("max_position_embeddings", "type_vocab_size"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors(source: Source, name: str) -> None:
    key = source.features if name == "features" else name
    for value in (True, 2.5, "12", float("nan"), -1, 0, None, [2], {}, 7, HUGE):
        source.options[key] = value
        source.write()
        source.fails(f"{source.folder}/.*")


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "initializer_range"])
def test_numbers_that_are_none(source: Source, name: str) -> None:
    for value in (True, "0.1", float("nan"), float("inf"), -0.1, 1.5, None, [], 9):
        source.options[name] = value
        source.write()
        source.fails(rf"{source.folder}/.*: {name}=.* (cannot be|is out of range)")


def test_heads(source: Source) -> None:
    for value in (True, 1.5, "4", -4, 0, 3, HUGE, None):
        source.options["num_attention_heads"] = value
        source.write()
        source.fails(rf"{source.folder}/.*num_attention_heads={value!r}")


@pytest.mark.parametrize("layers", [1, 7, 1_000_000, HUGE])
def test_layers_are_counted_before_they_are_built(source: Source, layers: int) -> None:
    source.options["num_hidden_layers"] = layers
    source.write()
    counted = f"has tensors of . layers, by its .* should have num_hidden_layers={layers}"
    source.fails(f"num_hidden_layers={layers} is out of range" if layers == HUGE else counted)


@pytest.mark.parametrize("options", [None, [], "options", 3, {1: 2}, {"num_labels": HUGE}])
def test_options_of_something_else(tmp_path: Path, options: Any) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.options = options
    checkpoint.write()
    checkpoint.fails("is no checkpoint of fairseq-train|has options in it that are not those of")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("depth", "cycle:" + "1" * 5000),
        ("depth", "cycle:3"),
        ("layout", "row"),
        ("blocks", HUGE),
        ("sharing", "eps"),
        ("sharing", "none"),
        ("released", True),
    ],
)
def test_options_by_which_the_tensors_would_be_others(
    tmp_path: Path, name: str, value: Any
) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.options[name] = value
    checkpoint.write()
    checkpoint.fails(f"{checkpoint.weights}")


def test_another_plan_of_equal_sizes(tmp_path: Path) -> None:
    """The state says how it is read."""
    checkpoint = Checkpoint(tmp_path)
    checkpoint.options["depth"] = "cycle:2"
    config = ShareBertConfig(**checkpoint.options)
    checkpoint.tensors = ShareBertForMaskedLM(config).state_dict()
    checkpoint.options["depth"] = "none"  # of two layers it is the same
    checkpoint.write()
    assert checkpoint.convert().config.depth == "none"
    checkpoint.out = tmp_path / "other"
    checkpoint.options.update(depth="all", blocks=3)
    checkpoint.write()
    checkpoint.fails("checkpoint.pt")


# ---------------------------------------------------------------------- tensors

TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "sparse": (lambda x: x.to_sparse(), "is no dense tensor"),
    "compressed": (lambda x: x.view(1, -1).to_sparse_csr(), "is no dense tensor"),
    "without values": (lambda x: x.to("meta"), "is a tensor without values"),
    "expanded": (lambda x: x[:1].clone().expand(x.shape), "and the file holds fewer numbers of it"),
    "of 10^12": (lambda x: torch.ones(1).expand(HUGE, 8), "and the file holds fewer numbers"),
    "whole numbers": (lambda x: x.long(), "is of torch.int64, not of a type that models"),
    "truth": (lambda x: x > 0, "is of torch.bool, not of a type that models"),
    "complex": (lambda x: x.to(torch.complex64), "is of torch.complex64, not of a type"),
    "8 bits": (lambda x: x.to(torch.float8_e4m3fn), "is of torch.float8_e4m3fn, not of a type"),
    "another type": (lambda x: x.to(torch.bfloat16), "has tensors of several types"),
    "NaN": (lambda x: x.clone().fill_(float("nan")), "is not finite everywhere"),
    "infinite": (lambda x: x.clone().fill_(float("inf")), "is not finite everywhere"),
    "a number": (lambda x: 3, "is a int, not a tensor"),
    "a list": (lambda x: x.tolist(), "is a list, not a tensor"),
    "none": (lambda x: None, "is a NoneType, not a tensor"),
    "a scalar": (lambda x: x.flatten()[0], r"is \(\)"),
    "empty": (lambda x: x[:0], r"is \(0"),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Validating sparse", "ignore:Casting complex")
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("which", ["table", "norm"])
def test_tensors_of_other_kinds(source: Source, which: str, kind: str) -> None:
    change, message = TENSORS[kind]
    name = getattr(source, which)
    source.tensors[name] = change(source.tensors[name])
    source.write()
    source.fails(message)


@pytest.mark.parametrize("tensors", [None, 3, "state", [], torch.ones(3), {1: torch.ones(3)}])
def test_no_state_dict(source: Source, tensors: Any) -> None:
    source.tensors = tensors
    source.write()
    source.fails("holds no state_dict of weights")


def test_tensors_missing_and_too_many(source: Source) -> None:
    norm = source.tensors.pop(source.norm)
    source.write()
    source.fails(r"has no bert.norm.weight.* of shape \(16,\)")
    source.tensors[source.norm] = norm
    source.tensors["more"] = norm
    source.write()
    source.fails("has more beside what makes a model|more is no tensor of the released ShareBERT")


@pytest.mark.parametrize("damage", [lambda x: x[:-3], lambda x: x[:1].expand(HUGE), lambda x: "x"])
def test_a_damaged_plan(tmp_path: Path, damage: Callable) -> None:
    checkpoint = Checkpoint(tmp_path)
    name = "bert.paramshare._extra_state"
    checkpoint.tensors[name] = damage(checkpoint.tensors[name])
    checkpoint.write()
    checkpoint.fails("checkpoint.pt: .*(plan in this state is damaged|fewer numbers|not a tensor)")


# ---------------------------------------------------------------------- pickles


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_is_run(source: Source, tmp_path: Path) -> None:
    for content in (Runs(tmp_path / "run"), {"model": Runs(tmp_path / "run")}):
        torch.save(content, source.weights)
        source.fails("it needs posix.mkdir, and what is in a file is not run")
    torch.save({"a": Path("x")}, source.weights)
    source.fails("it needs pathlib.PosixPath, and what is in a file is not run")


def _repacked(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the pickle in a file of torch.save, whose parts are whole then."""
    with zipfile.ZipFile(path) as parts:
        content = {name: parts.read(name) for name in parts.namelist()}
    with zipfile.ZipFile(path, "w") as parts:
        for name, data in content.items():
            parts.writestr(name, change(data) if name.endswith("data.pkl") else data)


LONG = b"\x8a\x06" + HUGE.to_bytes(6, "little")  # as pickles write such a number


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-3],
        lambda data: b"",
        lambda data: b"\x80\x02.",
        lambda data: data.replace(b"M@\x06", LONG),  # numbers of a storage: 200 x 8
        lambda data: data.replace(b"K\xc8K\x08\x86", LONG + b"K\x08\x86"),  # rows of the table
        lambda data: b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
        lambda data: b"\x80\x02})" + b"\x85" * 50_000 + b"K\x01s.",
        lambda data: b"\x80\x02X\xff\xff\xff\x7fa.",
    ],
)
def test_pickles_that_are_damaged(source: Source, change: Callable[[bytes], bytes]) -> None:
    before = source.weights.read_bytes()
    _repacked(source.weights, change)
    assert source.weights.read_bytes() != before
    source.fails(f"{source.weights} (cannot be read: .|holds no state_dict|is no checkpoint)")


def test_what_is_no_file(source: Source, tmp_path: Path) -> None:
    for make, message in (
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "it is a folder"),
        (os.mkfifo, "it is neither a file nor a folder"),
        (lambda path: path.write_text("<html>"), "it is no file of torch.save"),
    ):
        if source.weights.is_dir():
            source.weights.rmdir()
        source.weights.unlink(missing_ok=True)
        make(source.weights)
        source.fails(f"{source.weights} cannot be read: {message}")


@pytest.mark.parametrize("content", [None, 3, "text", [1], {}, torch.ones(3), {"task_state": 1}])
def test_checkpoints_of_something_else(tmp_path: Path, content: Any) -> None:
    checkpoint = Checkpoint(tmp_path)
    torch.save(content, checkpoint.weights)
    checkpoint.fails("is no checkpoint of fairseq-train --arch sharebert")


# ---------------------------------------------------------------------- JSON

TEXTS = {
    "nested": (b"[" * 100_000, "it is nested too deeply"),
    "nested objects": (b'{"a":' * 100_000, "it is nested too deeply"),
    "a list": (b"[]", "it holds a list instead of an object"),
    "null": (b"null", "it holds a NoneType instead of an object"),
    "a text": (b'"factor_size"', "it holds a str instead of an object"),
    "empty": (b"", "Expecting value"),
    "half": (b'{"vocab_size": 2', "Expecting"),
    "another encoding": (b"\xff\xfe{}", "codec can't decode"),
    "digits": (b'{"vocab_size": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_damaged_json(tmp_path: Path, name: str) -> None:
    text, message = TEXTS[name]
    released = Source(tmp_path)
    (released.folder / "config.json").write_bytes(text)
    released.fails(rf"config\.json cannot be read: .*{message}")
    with pytest.raises(ShareError, match=message):
        read_json(released.folder / "config.json")


@pytest.mark.parametrize("name", TEXTS)
def test_damaged_folders_of_transformers(tmp_path: Path, name: str) -> None:
    """Which a model of fairseq is to start from."""
    config = ShareBertConfig(**Checkpoint(tmp_path).options)
    model = ShareBertForMaskedLM(config)
    model.save_pretrained(tmp_path / "good")
    before = model.bert.embeddings.tokens.weight.clone()
    fill_from(tmp_path / "good", model, config, [])
    (tmp_path / "good" / "config.json").write_bytes(TEXTS[name][0])
    with pytest.raises(ShareError, match=f"{tmp_path}/good cannot be read: "):
        fill_from(tmp_path / "good", model, config, [])
    assert torch.equal(model.bert.embeddings.tokens.weight, before)
