"""Scoring of recipes/coco_captioning: values, refusals, and Java that is there, absent, broken."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import RECIPES, load

pytest.importorskip("pycocoevalcap", reason="pycocoevalcap is not installed")
pytest.importorskip("fairseq", reason="fairseq is not installed")

scoring, coco_json, java, score, stages = load(
    "coco_captioning", "scoring", "coco_json", "java", "score", "stages"
)

REFERENCES = {
    7: ["A cat sits.", "The cat is sitting here."],
    3: ["Two dogs run", "dogs running fast"],
    5: ["red bus", "A red bus, on a street"],
}
CAPTIONS = {3: "two dogs", 5: "a red bus on street", 7: "A cat a cat"}


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "missing", lambda: "java is not installed")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """References and results."""
    return write(tmp_path / "test.json", annotations()), write(tmp_path / "said.json", results())


def annotations(references: dict[int, list[str]] = REFERENCES) -> dict[str, Any]:
    pairs = [(picture, text) for picture, texts in references.items() for text in texts]
    return {
        "images": [{"id": picture, "file_name": f"{picture}.png"} for picture in references],
        "annotations": [
            {"id": number, "image_id": picture, "caption": text}
            for number, (picture, text) in enumerate(pairs)
        ],
    }


def results(captions: dict[int, str] = CAPTIONS) -> list[dict[str, Any]]:
    return [{"image_id": picture, "caption": text} for picture, text in captions.items()]


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def refused(capsys: pytest.CaptureFixture[str], references: Path, *files: Path) -> str:
    """The message of a run that is refused: one line, and nothing else."""
    assert score.main([*map(str, files), "--references", str(references)]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert captured.out == ""
    return captured.err


# ---------------------------------------------------------------------- values


def test_bleu_by_hand(no_java: None) -> None:
    """Clipped matches of n-grams over n-grams said; 11 words for references of 3, 3 and 6."""
    found = scoring.score_captions(REFERENCES, CAPTIONS)
    brevity = math.exp(1 - 12 / 11)
    matches = (9 / 11, 5 / 8, 2 / 5, 1 / 3)
    for n in range(1, 5):
        expected = 100 * brevity * math.prod(matches[:n]) ** (1 / n)
        assert found.table[f"BLEU-{n}"] == pytest.approx(expected, abs=1e-6)


def test_cider_d_by_its_definition(no_java: None) -> None:
    """https://arxiv.org/abs/1411.5726, equations 1, 2 and 6."""

    def grams(text: str, n: int) -> Counter[tuple[str, ...]]:
        words = text.lower().replace(".", "").replace(",", "").split()
        return Counter(zip(*(words[start:] for start in range(n)), strict=False))

    def weigh(text: str, n: int) -> dict[tuple[str, ...], float]:
        def pictures(gram: tuple[str, ...]) -> int:
            return sum(any(gram in grams(t, n) for t in texts) for texts in REFERENCES.values())

        counts = grams(text, n)
        return {g: c * math.log(len(REFERENCES) / max(1, pictures(g))) for g, c in counts.items()}

    def norm(vector: dict[tuple[str, ...], float]) -> float:
        return math.sqrt(sum(weight**2 for weight in vector.values()))

    expected = {}
    for picture, caption in CAPTIONS.items():
        total = 0.0
        for text in REFERENCES[picture]:
            apart = len(caption.split()) - len(text.split())
            for n in range(1, 5):
                said, true = weigh(caption, n), weigh(text, n)
                product = sum(min(w, true.get(g, 0)) * true.get(g, 0) for g, w in said.items())
                if product:
                    near = math.exp(-(apart**2) / (2 * 6**2))
                    total += near * product / norm(said) / norm(true)
        expected[picture] = 100 * 10 * total / 4 / len(REFERENCES[picture])
    found = scoring.score_captions(REFERENCES, CAPTIONS)
    assert found.cider == pytest.approx(expected, abs=1e-6)
    assert found.table["CIDEr"] == pytest.approx(sum(expected.values()) / 3, abs=1e-6)
    assert min(expected.values()) > 10


def test_perfect_captions(no_java: None) -> None:
    perfect = {1: "a dog on the red sofa", 2: "two men play chess outside"}
    found = scoring.score_captions({k: [v] for k, v in perfect.items()}, perfect).table
    assert found == pytest.approx(dict.fromkeys(found, 100) | {"CIDEr": 1000}, abs=1e-4)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), empty=st.booleans())
def test_order_makes_no_difference(no_java: None, seed: int, empty: bool) -> None:
    """Not in the last bit."""
    rng = random.Random(seed)
    words = ["dog", "cat", "on", "a", "red", "mat", "runs"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(40)]
    references = {n: texts[4 * n : 4 * n + 3] for n in range(10)}
    captions = {n: texts[4 * n + 3] for n in range(10)} | ({4: ""} if empty else {})
    one = scoring.score_captions(references, captions)
    mixed = list(references.items())
    rng.shuffle(mixed)
    others = {picture: rng.sample(found, k=len(found)) for picture, found in mixed}
    said = dict(rng.sample(list(captions.items()), k=10))
    other = scoring.score_captions(others, said)
    assert (one.table, one.cider, one.empty) == (other.table, other.cider, int(empty))


def test_an_empty_caption_scores_nothing(no_java: None) -> None:
    found = scoring.score_captions(REFERENCES, CAPTIONS | {5: " ... "})
    assert found.empty == 1
    assert found.cider[5] == 0


# ---------------------------------------------------------------------- the command


def test_the_command_without_java(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The table, what it must say of itself, and the same in JSON."""
    references, said = files
    shuffled = write(tmp_path / "other.json", results(dict(reversed(CAPTIONS.items()))))
    out = tmp_path / "scores.json"
    done = python(
        *(RECIPES / "coco_captioning/score.py", said, shuffled),
        *("--references", references, "--json", out),
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    *_, head, bleu = done.stdout.partition("BLEU-2")[0].rstrip().splitlines()
    assert head.split() == ["said", "other"]
    assert bleu.split() == ["BLEU-1", "74.7", "74.7"]
    for line in (
        "pictures: 3",
        f"tokens: {scoring.PLAIN}",
        "left out: METEOR: java is not installed",
        "left out: SPICE: java is not installed",
    ):
        assert done.stdout.count(f"\n{line}\n") == 1, done.stdout
    assert "ratio" not in done.stdout  # what pycocoevalcap prints
    first, second = json.loads(out.read_text("utf-8")).values()
    assert first == second
    assert set(first["cider"]) == {"3", "5", "7"}
    assert list(first["table"]) == [*(f"BLEU-{n}" for n in range(1, 5)), "ROUGE-L", "CIDEr"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("other.json", "said.json", "scores.json", "test.json")
    ]


def test_files_of_one_name_keep_their_folders(no_java: None, files, capsys, tmp_path) -> None:
    references, said = files
    (tmp_path / "b").mkdir()
    other = shutil.copy(said, tmp_path / "b")
    assert score.main([str(said), str(other), "--references", str(references)]) == 0
    assert f"  {said}  {other}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["score.py", "gallery.py"])
def test_help_needs_nothing_installed(name: str, tmp_path: Path) -> None:
    """-S: without the installed packages."""
    script = RECIPES / "coco_captioning" / name
    shown = python("-S", script, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "--references FILE" in shown.stdout
    given = ["x.json"] if name == "score.py" else ["--captions", "a=x.json", "--out", tmp_path]
    done = python("-S", script, *given, "--references", "y.json")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name}: not installed: numpy, pycocoevalcap")
    assert done.stderr.count("\n") == 1


WRONG_RESULTS: dict[str, tuple[Any, str]] = {
    "empty": ([], "said.json holds no captions"),
    "damaged": ('[{"image_id": 3,', "said.json is no JSON"),
    "object": ({"image_id": 3, "caption": "x"}, "is no COCO results file"),
    "strings": (["x"], "is no COCO results file"),
    "number": (results({**CAPTIONS, 5: 12}), "12 is no text"),  # type: ignore[dict-item]
    "null": (results({**CAPTIONS, 5: None}), "None is no text"),  # type: ignore[dict-item]
    "half a character": (r'[{"image_id": 3, "caption": "\ud800"}]', "surrogates not allowed"),
    "text id": ([{"image_id": "3", "caption": "x"}], "the id '3' is no whole number"),
    "no caption": ([{"image_id": 3}], "'caption' is missing"),
    "twice": (results() + results()[:2], "2 x caption of a picture that came before, first: 3"),
    "other split": (
        results({**CAPTIONS, 11: "x", 10: "y"}),
        "2 x caption of a picture that is not in {references}, first: 11",
    ),
    "one short": (
        results({3: "x", 5: "y"}),
        "1 x picture of {references} without a caption, first: 7",
    ),
}


@pytest.mark.parametrize("case", WRONG_RESULTS)
def test_wrong_results_are_refused(case: str, no_java: None, files, capsys) -> None:
    references, said = files
    content, message = WRONG_RESULTS[case]
    wrong = write(said, content)
    assert message.format(references=references) in refused(capsys, references, wrong)


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in annotations().items() if name != key}


def _changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    content = annotations()
    change(content)
    return content


WRONG_REFERENCES: dict[str, tuple[Any, str]] = {
    "damaged": ("{", "test.json is no JSON"),
    "list": (results(), "is no COCO annotation file"),
    "no pictures": (_without("images"), "'images' is missing"),
    "no captions": (_without("annotations"), "'annotations' is missing"),
    "picture twice": (
        _changed(lambda x: x["images"].append(x["images"][1])),
        "1 x picture id that came before, first: 3",
    ),
    "annotation twice": (
        _changed(lambda x: x["annotations"].append(x["annotations"][2])),
        "1 x annotation id that came before, first: 2",
    ),
    "unknown picture": (
        _changed(lambda x: x["images"].pop(0)),
        "2 x annotation of a picture that it does not list, first: 7",
    ),
    "no reference": (
        annotations({**REFERENCES, 5: []}),
        "1 x picture without references, first: 5",
    ),
    "folder": (_changed(lambda x: x.update(info={"pictures": 3})), "3 is no text"),
    "info": (_changed(lambda x: x.update(info=[3])), "is no COCO annotation file"),
    "infinite id": (_changed(lambda x: x["images"][0].update(id=1e400)), "the id inf is no whole"),
    "deep": ("[" * 100_000, "test.json is no JSON"),
    "key twice": ('{"images": [], "images": []}', "an object has the key 'images' twice"),
    "wordless": (
        annotations({**REFERENCES, 5: ["a bus", "..."]}),
        "1 x picture with a reference that has no word, first: 5",
    ),
}


@pytest.mark.parametrize("case", WRONG_REFERENCES)
def test_wrong_references_are_refused(case: str, no_java: None, files, capsys) -> None:
    references, said = files
    content, message = WRONG_REFERENCES[case]
    write(references, content)
    if case == "wordless":  # known only when the tokens are
        with pytest.raises(stages.UserError, match=message):
            scoring.score_captions({**REFERENCES, 5: ["a bus", "..."]}, CAPTIONS)
    else:
        assert message in refused(capsys, references, said)


def test_one_picture_is_refused(no_java: None, capsys, tmp_path) -> None:
    """All of its words are in all pictures' references, so that CIDEr would be 0."""
    references = write(tmp_path / "test.json", annotations({7: REFERENCES[7]}))
    said = write(tmp_path / "said.json", results({7: "a cat"}))
    assert "has 1 picture: CIDEr weighs words" in refused(capsys, references, said)
    with pytest.raises(stages.UserError, match="the references has 1 picture"):
        scoring.score_captions({7: REFERENCES[7]}, {7: "a cat"})


def test_absent_files_and_folders(no_java: None, files, capsys, tmp_path) -> None:
    references, said = files
    absent = tmp_path / "absent.json"
    assert f"{absent} is not there" in refused(capsys, references, said, absent)
    assert f"{absent} is not there" in refused(capsys, absent, said)
    arguments = [str(said), "--references", str(references), "--json", str(absent / "x")]
    assert score.main(arguments) == 1
    assert "give a file in a folder that is there" in capsys.readouterr().err


# ---------------------------------------------------------------------- Java


@pytest.fixture
def make_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a stand-in on the path, a shell script. Its PTB only makes lower case."""

    def make(cases: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "java"
        ptb = "*PTBTokenizer*) exec tr A-Z a-z;;"
        program.write_text(f'#!/bin/sh\ncase "$*" in {cases}\n{ptb}\n*) ;; esac\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        java.missing.cache_clear()

    yield make  # type: ignore[misc]
    java.missing.cache_clear()


def test_a_meteor_that_dies_is_a_message(make_java) -> None:
    make_java('*meteor*) echo "Out of memory" >&2; exit 1;;')
    found = scoring.score_captions(REFERENCES, CAPTIONS)
    assert found.left_out["METEOR"] == "its Java process broke off: Out of memory"
    assert found.tokenisation == scoring.PTB
    assert "METEOR" not in found.table
    assert found.table["CIDEr"] > 0


def test_spice_is_never_downloaded(make_java) -> None:
    make_java("")
    found = scoring.score_captions(REFERENCES, CAPTIONS)
    assert java.FETCH_SPICE in found.left_out["SPICE"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('[{"scores": {"All": {"f": 0.5}}}, {"scores": {"All": {"f": 0.1}}},'
         ' {"scores": {"All": {"f": 0.0}}}]', 20),
        ('[{"scores": {"All": {"f": 0.5}}}]', "it scored 1 of 3 captions"),
        ("", "it wrote no scores"),
    ],
)  # fmt: skip
def test_spice_where_its_models_are(make_java, monkeypatch, answer: str, expected: Any) -> None:
    """A stand-in: the models are no package."""
    make_java(f"""*spice*) while [ "$1" != -out ]; do shift; done; echo '{answer}' > "$2";;""")
    monkeypatch.setattr(java, "spice_missing", lambda: None)
    found = scoring.score_captions(REFERENCES, CAPTIONS)
    assert (found.table.get("SPICE") or found.left_out["SPICE"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ('*PTBTokenizer*) echo "no class" >&2; exit 3;;', "status 3: no class"),
        ("*PTBTokenizer*) echo one line;;", "1 lines of tokens came back for 6 captions"),
    ],
)
def test_other_tokens_do_not_stand_in_for_a_broken_ptb(make_java, cases, message) -> None:
    make_java(cases)
    with pytest.raises(stages.UserError, match=message):
        scoring.score_captions(REFERENCES, CAPTIONS)


def test_java_that_does_not_run_is_absent(make_java) -> None:
    """As the stub of macOS."""
    make_java('-version) echo "Unable to locate a Java Runtime" >&2; exit 1;;')
    assert java.missing() == "java -version ends with status 1: Unable to locate a Java Runtime"
    assert scoring.score_captions(REFERENCES, CAPTIONS).tokenisation == scoring.PLAIN


@pytest.mark.skipif(java.missing() is not None, reason="java is not installed: METEOR, PTB")
def test_java_as_pycocoevalcap_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens and METEOR as by its own classes, but in any locale, and with captions that
    are empty or have line breaks of any kind."""
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    references = REFERENCES | {9: ["A 1 1/2 café's menu -- (old)", 'It says "no" ||| yes']}
    captions = CAPTIONS | {9: "", 11: "a\rmenu\u2028in\x85a caf\u00e9\n"}
    references[11] = ["A menu in a café."]
    plain = {9: "", 11: "a menu in a café"}

    def official(texts: dict[int, list[str]]) -> dict[int, list[str]]:
        return PTBTokenizer().tokenize(
            {picture: [{"caption": text} for text in found] for picture, found in texts.items()}
        )

    true = official(dict(sorted(references.items())))
    said = official({picture: [(captions | plain)[picture]] for picture in true})
    texts = [text for picture in true for text in references[picture]]
    assert java.tokenise(texts) == [tokens for found in true.values() for tokens in found]
    expected, _ = Meteor().compute_score(true, said)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=de -Duser.country=DE")
    found = scoring.score_captions(references, captions)
    assert found.table["METEOR"] == pytest.approx(100 * expected, abs=1e-9)
    assert found.tokenisation == scoring.PTB
    assert found.cider[11] > 500
