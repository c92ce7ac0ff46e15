"""Labelled texts of recipes/bert_mlm: what a file says is read, or refused, whatever its format."""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from loading import load, within
from made_up import write, write_jsonl

pytest.importorskip("transformers", reason="transformers is not installed")

examples, probing, vectors = load(
    "bert_mlm", "texts.examples", "measures.probing", "measures.vectors"
)
FORMS = ("jsonl", "csv", "tsv", "parquet")
TYPED = ("jsonl", "parquet")
NAN = math.nan


@pytest.fixture(autouse=True)
def _scripts_find_their_modules() -> Iterator[None]:
    with within("bert_mlm"):
        yield


def store(path: Path, content: list[dict[str, Any]]) -> Path:
    """In the format that the suffix says."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, content)
    if path.suffix == ".parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(content), path)
        return path
    form = (
        {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
        if path.suffix == ".tsv"
        else {}
    )
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(content[0]), **form)
        writer.writeheader()
        writer.writerows(content)
    return path


def read(path: Path, *options: str) -> Any:
    parser = argparse.ArgumentParser()
    examples.add_options(parser)
    found = examples.load(parser.parse_args(["--train", str(path), "--dev", str(path), *options]))
    assert found.splits["train"] == found.splits["dev"]
    return found


def labelled(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": f"text {n}", "label": label} for n, label in enumerate(labels, 1)]


def refused(path: Path, *options: str) -> str:
    with pytest.raises(examples.UserError) as error:
        read(path, *options)
    assert str(path) in str(error.value)
    return str(error.value)


def place(path: Path, number: int) -> str:
    """Of a row, counted from 1."""
    before = path.suffix in (".csv", ".tsv")
    return f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {number + before}"


TEXTS = ("nan", "5", " a", "None", "say 'no'", "a,b", 'a "b" c', "one\u2028line", "đi", "true", "-")


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_what_the_file_says(form: str, tmp_path: Path) -> None:
    content = [{"text": text, "text2": f"{text} ", "label": n % 2} for n, text in enumerate(TEXTS)]
    found = read(store(tmp_path / f"x.{form}", content))
    assert [example.texts for example in found.splits["train"]] == [(x, f"{x} ") for x in TEXTS]
    if form != "parquet":
        marked = tmp_path / f"marked.{form}"
        marked.write_bytes(b"\xef\xbb\xbf" + (tmp_path / f"x.{form}").read_bytes())
        assert read(marked).splits == found.splits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["vi", "nan", "de", "en"], ["de", "en", "nan", "vi"]),  # nan: Min Nan, a language
        (["inf", "none", "b", "1"], ["1", "b", "inf", "none"]),
        ([10, 9, -1, 2], ["-1", "2", "9", "10"]),
        ([1.0, 0.0, -0.0, 2.5], ["0", "1", "2.5"]),
        (["1_0", "2", "1e400", "٣"], ["2", "1_0", "1e400", "٣"]),
        ([True, False, True], ["False", "True"]),
    ],
)
def test_labels_in_their_order(form: str, labels: list, names: list[str], tmp_path: Path) -> None:
    found = read(store(tmp_path / f"x.{form}", labelled(*labels)))
    assert found.names == names
    said = [str(label).removesuffix(".0").replace("-0", "0") for label in labels]
    assert [names[int(example.label)] for example in found.splits["train"]] == said


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", [None, NAN, math.inf, -math.inf, "", "  "])
@pytest.mark.parametrize("options", [(), ("--regression",)])
def test_a_missing_label_is_no_class(
    form: str, label: Any, options: tuple[str, ...], tmp_path: Path
) -> None:
    others = ("0", "1") if form == "parquet" and isinstance(label, str) else (0.0, 1.0)
    path = store(tmp_path / f"x.{form}", labelled(*others, label, *others))
    message = refused(path, *options)
    assert message.startswith(place(path, 3))
    if form in TYPED and not (isinstance(label, float) and math.isinf(label)):
        assert "lacks the label" in message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", ["nan", "NaN", "NA", "n/a", "NULL", "None", "-inf"])
def test_what_stands_for_a_number_that_is_missing(form: str, label: str, tmp_path: Path) -> None:
    path = store(tmp_path / f"x.{form}", labelled("0", "1.5", label))
    said = f"{place(path, 3)}: label '{label}' is not a number, "
    assert refused(path) == f"{said}but all others are"
    assert refused(path, "--regression") == f"{said}which --regression needs"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", ["good", "1_0", "1,5", "0x1", "1 2", "٣", True])
def test_what_is_no_number(form: str, label: Any, tmp_path: Path) -> None:
    path = store(tmp_path / f"x.{form}", labelled(label, label))
    said = refused(path, "--regression").replace("'", "")
    assert said == f"{place(path, 1)}: label {label} is not a number, which --regression needs"


@pytest.mark.parametrize("form", FORMS)
def test_numbers(form: str, tmp_path: Path) -> None:
    numbers = [2, -1.5, 3e-7, 1e16] if form == "parquet" else [2, "-1.5", " +3e-7", 1e16, ".5"]
    found = read(store(tmp_path / f"x.{form}", labelled(*numbers)), "--regression")
    assert [example.label for example in found.splits["train"]] == list(map(float, numbers))


@pytest.mark.parametrize("form", FORMS)
def test_a_label_of_no_training_text_is_named(form: str, tmp_path: Path) -> None:
    train = store(tmp_path / f"train.{form}", labelled("0", "1"))
    dev = store(tmp_path / f"dev.{form}", labelled("0", "1", "nan"))
    parser = argparse.ArgumentParser()
    examples.add_options(parser)
    with pytest.raises(examples.UserError) as error:
        examples.load(parser.parse_args(["--train", str(train), "--dev", str(dev)]))
    assert str(error.value).startswith(f"{place(dev, 3)}: label 'nan' is in the dev texts, but not")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", [None, "", " \u3000", "a\0b"])
@pytest.mark.parametrize("column", ["text", "text2"])
def test_a_missing_text_is_no_text(form: str, text: Any, column: str, tmp_path: Path) -> None:
    whole = [{"text": "a", "text2": "b", "label": n} for n in (0, 1, 0)]
    path = store(tmp_path / f"x.{form}", [*whole[:2], {**whole[2], column: text}])
    message = refused(path)
    assert message.startswith(place(path, 3))
    assert (f"lacks the {column}" if text != "a\0b" else "NUL") in message


@pytest.mark.parametrize(
    ("form", "value"),
    [
        *((form, value) for form in TYPED for value in ([1], {"a": 1}, 5, 0.5, True)),
        *(("parquet", value) for value in (b"a", datetime.date(2024, 1, 1))),
    ],
)
def test_other_types(form: str, value: Any, tmp_path: Path) -> None:
    path = store(tmp_path / f"text.{form}", [{"text": value, "label": 0}])
    assert refused(path) == f"{place(path, 1)} has the text {value!r}, which is no text"
    if not isinstance(value, int | float):
        path = store(tmp_path / f"label.{form}", labelled(value, value))
        assert refused(path) == (
            f"{place(path, 1)} has the label {value!r}, which is neither a text nor a number"
        )


def test_numbers_of_other_types(tmp_path: Path) -> None:
    path = store(tmp_path / "x.parquet", labelled(Decimal("1.00"), Decimal("2.50")))
    assert read(path).names == ["1", "2.50"]
    assert [x.label for x in read(path, "--regression").splits["dev"]] == [1, 2.5]


LINES = {
    # of a JSONL, after two good ones
    '{"text": "a", "label": NaN}': "lacks the label",
    '{"text": "a", "label": 1e400}': "has the label inf, which is neither",
    '{"text": "a", "label": true}': "has the label True, .* has 0: use booleans for all",
    '{"text": "a", "label": 0, "label": 1}': "is not JSON: an object has the key 'label' twice",
    '{"text": "\\ud800", "label": 0}': "has a text with a NUL or half a character",
    '{"text": "a", "label": "\\ud800"}': "has a label with a NUL or half a character",
    "[" * 100_000: "is not JSON: ",
    '{"text": "a", "label": ' + "1" * 5000 + "}": "is not JSON: ",
    '\ufeff{"text": "a", "label": 0}': "is not JSON: ",
    '{"text": "a", "label": 0} {"text": "b", "label": 1}': "is not JSON: ",
    '"text"': "is not a JSON object",
    '{"text": "a"}': "lacks the label",
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:40])
def test_lines_of_json(line: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", labelled(0, 1))
    path.write_text(f"{path.read_text()}\n{line}\n", "utf-8")
    with pytest.raises(examples.UserError, match=rf"x\.jsonl, line 4 {LINES[line]}"):
        read(path)


def test_large_whole_numbers(tmp_path: Path) -> None:
    """JSON's have no end, floats do."""
    path = write_jsonl(tmp_path / "x.jsonl", labelled(10**400, 1e16, 10**16))
    assert read(path).names == [str(10**16), str(10**400)]
    assert "line 1: label 1000" in refused(path, "--regression")


TABLES = {
    "text,label\na,0\nb,1\nc\n": "line 4 has 1 cell(s) for 2 columns",
    "text,label\na,0\nb, c,1\n": "line 3 has 3 cell(s) for 2 columns",
    # A line end in a text that has no quotes: its first half would be read, without the second.
    "label,text,note\n0,a,x\n1,b\nc,d,x\n": "line 3 has 2 cell(s) for 3 columns",
    'text,label\na,0\n"b,1\nc,0\n': "line 3 is not CSV: unexpected end of data",
    'text,label\na,0\n"b"c,1\n': "line 3 is not CSV: ",
    'label,text\n0,a\n1, "b"\n': "line 3 has a space before a quote",
    'text,label\n"a\nb",0\nc,\n': "line 4 lacks the label",
    "text,label,label\na,0,1\n": "has the column 'label' twice",
    "text,label, label\na,0,1\n": "has the column 'label' twice",
    "text,label\na,0\ntext,label\nb,1\n": "line 3 is the header again",
    "text,label\na,0\n\ufefftext,label\nb,1\n": "line 3 is the header again",
    f"text,label\n{'a' * 200_000},1\n": "line 2 is not CSV: field larger",
    "a,0\nb,1\n": "has no column 'text'",
    "text,label\n": "has no rows",
    "\n\n": "has no rows",
}


@pytest.mark.parametrize("content", TABLES, ids=lambda content: repr(content[:40]))
def test_tables(content: str, tmp_path: Path) -> None:
    assert TABLES[content] in refused(write(tmp_path / "x.csv", content))
    if '"' not in content:  # a character as others, in a .tsv
        path = write(tmp_path / "x.tsv", content.replace(",", "\t"))
        assert TABLES[content] in refused(path)


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv"])
@pytest.mark.parametrize("wrong", [b"\xff", "đ".encode()[:1], "é".encode("latin-1")])
def test_what_is_not_utf8_is_found(form: str, wrong: bytes, tmp_path: Path) -> None:
    """Also far behind what is decoded at once."""
    path = store(tmp_path / f"x.{form}", labelled(*[0, 1] * 5000))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"text 9000", b"text 9000" + wrong))
    assert refused(path) == f"{place(path, 9000)} is not UTF-8 text"
    path.write_text("text,label\na,0\nb,1\n", "utf-16")
    assert refused(path) == f"{path}, line 1 is not UTF-8 text"


def test_parquet_that_is_damaged(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    ends = arrow.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1, 2)))
    texts = arrow.Array.from_buffers(arrow.utf8(), 2, [None, ends, arrow.py_buffer(b"a\xff")])
    parquet.write_table(arrow.table({"text": texts, "label": [0, 1]}), path)
    assert "Invalid UTF8 sequence at string index 1" in refused(path)
    columns = [arrow.array(["a", "b"]), arrow.array([0, 1]), arrow.array([1, 0])]
    parquet.write_table(arrow.table(columns, names=["text", "label", "label"]), path)
    assert "has the column 'label' twice" in refused(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "is not a Parquet file that can be read" in refused(path)


def test_rows_of_glue_are_named_as_they_lie(tmp_path: Path) -> None:
    """Behind rows that are left out, and in the second of two files."""
    header = "id\tquestion1\tquestion2\tis_duplicate\n"
    write(tmp_path / "qqp/train.tsv", f"{header}0\ta\t\t1\n1\tcut off\n2\tc\td\t0\n")
    write(tmp_path / "qqp/dev.tsv", f"{header}0\ta\tb\t1\n1\tcut off\n2\tc\td\t7\n")
    for number, label in enumerate((0, 1)):
        names = ("train", "validation")
        for name in names:
            content = [{"sentence1": "a", "sentence2": "b", "label": label}]
            write_jsonl(tmp_path / f"rte/{name}-{number}.jsonl", content)
    write_jsonl(tmp_path / "rte/train-1.jsonl", [{"sentence1": "a", "sentence2": "b"}])
    parser = argparse.ArgumentParser()
    examples.add_options(parser)

    def said(task: str) -> str:
        with pytest.raises(examples.UserError) as error:
            examples.load(parser.parse_args(["--glue", task, "--glue-dir", str(tmp_path)]))
        return str(error.value)

    assert f"{tmp_path}/qqp/dev.tsv, line 4: label '7' is in the dev texts" in said("qqp")
    assert said("rte") == f"{tmp_path}/rte/train-1.jsonl, line 1 lacks the label"
    write(tmp_path / "qqp/dev.tsv", f"{header}0\ta\tb\t1\n")
    found = examples.load(parser.parse_args(["--glue", "qqp", "--glue-dir", str(tmp_path)]))
    assert found.splits["train"] == [(("a", ""), 1), (("c", "d"), 0)]


@pytest.mark.parametrize(
    "target",
    [
        {"span1": [0, 1], "label": NAN},
        {"span1": [0, 1.9], "label": "x"},
        {"span1": [0, math.inf], "label": "x"},
        {"span1": [False, True], "label": "x"},
        {"span1": [0], "label": "x"},
    ],
)
def test_targets_of_probes(target: dict[str, Any], tmp_path: Path) -> None:
    content = [{"text": "a b", "targets": [target]}]
    path = write_jsonl(tmp_path / "x.jsonl", content)
    with pytest.raises(probing.UserError, match=r"x\.jsonl, line 1 is not \{\"text\""):
        probing.read(path)


def test_ratings_of_words(tmp_path: Path) -> None:
    for rating in ("nan", "inf", "high", ""):
        path = write(tmp_path / "x.tsv", f"good\tfine\t9\nbad\tking\t{rating}\n")
        with pytest.raises(vectors.UserError, match=r"x\.tsv, line 2: not two words and a rating"):
            vectors.read_pairs(path)


def test_files_written_by_hand(tmp_path: Path) -> None:
    """Spaces after commas, empty columns at the end, lines that end as on Windows."""
    path = write(tmp_path / "x.csv", "label, text,,\r\n1, a,,\r\n\r\n0,b,,\r\n")
    assert read(path).splits["train"] == [((" a",), 1), (("b",), 0)]
    content = [json.loads(line) for line in ('{"text": "a", "label": 0}', '{"text":"b","label":1}')]
    path = write_jsonl(tmp_path / "x.jsonl", content)
    path.write_text(path.read_text().replace("\n", "\r\n\r\n"), newline="")
    assert read(path).splits["train"] == [(("a",), 0), (("b",), 1)]
