"""The data preparation of recipes/iwslt15_envi: readers, rules, stages, and the command itself."""

import importlib.util
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tarfile
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from commands import python
from loading import RECIPES, load

RECIPE = "iwslt15_envi"
PREPARE = RECIPES / RECIPE / "prepare.py"


clean, extract, iwslt15, stages, prepare = load(
    RECIPE, "clean", "extract", "iwslt15", "stages", "prepare"
)
Pair = clean.Pair

needs_all = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in prepare.NEEDED),
    reason="the recipe needs " + ", ".join(prepare.NEEDED.values()),
)


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(PREPARE, *arguments, env={**os.environ, **environment})


# Readers


def page(body: str) -> str:
    return f"<html><head><title>T</title></head><body>{body}</body></html>"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_help_pages_are_aligned_by_id(tmp_path: Path) -> None:
    write(
        tmp_path / "en/a/x.html",
        page(
            '<nav><p id="par_0">Menu</p></nav><h1 id="hd_1" dir="auto"><a name="q"></a>Title</h1>'
            '<p id="par_2">Press <span class="ui">OK</span><br>twice.</p>'
            '<p id="par_3">Only English.</p><p id="bm_9">Module</p>'
            '<script>var p = "<p id=par_4>no</p>";</script>'
            '<p id="par_2">Embedded again.</p>'
        ),
    )
    write(
        tmp_path / "vi/a/x.html",
        page(
            '<nav><p id="par_0">Đơn</p></nav><p id="par_2">Bấm <b>OK</b><br/>hai lần.</p>'
            '<h1 id="hd_1">Tựa</h1><p id="bm_9">Mô-đun</p><p id="par_2">Nhúng lại.</p>'
        ),
    )
    write(tmp_path / "en/a/untranslated.html", page('<p id="par_1">Nothing.</p>'))
    pairs = list(extract.pages_by_id(tmp_path / "en", tmp_path / "vi", ("hd_", "par_")))
    assert pairs == [
        ("a/x.html", "Title", "Tựa"),
        ("a/x.html", "Press OK twice.", "Bấm OK hai lần."),
    ]


def test_pages_in_order_need_equal_tags(tmp_path: Path) -> None:
    english = write(
        tmp_path / "p.en.html",
        page(
            "<div><p>One\n <em>two</em>.</p><pre>ls -l</pre><ul><li>A<ul><li>B</li></ul>C</li></ul>"
        ),
    )
    agrees = write(
        tmp_path / "p.vi.html",
        page("<div><p>Một hai.</p><pre>ls -l\n-a</pre><ul><li>Á<ul><li>Bờ</li></ul>Cờ</li></ul>"),
    )
    differs = write(tmp_path / "q.vi.html", page("<div><p>Một hai.</p><p>A</p><p>B</p><p>C</p>"))
    assert list(extract.pages_in_order(english, agrees)) == [
        ("p.en.html", "One two.", "Một hai."),
        ("p.en.html", "A", "Á"),
        ("p.en.html", "B", "Bờ"),
        ("p.en.html", "C", "Cờ"),
    ]
    assert list(extract.pages_in_order(english, differs)) == []


def mo_file(messages: dict[str, str], order: str) -> bytes:
    """A .mo file as msgfmt lays it out: two tables of (length, offset), then the strings."""
    originals = [key.encode() for key in messages]
    translations = [value.encode() for value in messages.values()]
    tables = 28 + 16 * len(messages)
    body, entries = b"", []
    for string in originals + translations:
        entries.append((len(string), tables + len(body)))
        body += string + b"\0"
    header = struct.pack(
        order + "7I", 0x950412DE, 0, len(messages), 28, 28 + 8 * len(messages), 0, 0
    )
    return header + b"".join(struct.pack(order + "2I", *entry) for entry in entries) + body


@pytest.mark.parametrize("order", ["<", ">"])
def test_catalogue(tmp_path: Path, order: str) -> None:
    messages = {
        "": "Content-Type: text/plain; charset=utf-8\n",
        "dialog|ok\x04~Close the <b>file</b>": "Đón~g tập tin &amp; thoát",
        "%d file\0%d files": "%d tập tin",
        "Filtering on|people with media": "người có ảnh",
        "a|b": "a|bê",
        "my_file_name _x": "tên_tập_tin _x",
        "no such <file>": "không có <file>",
    }
    path = tmp_path / "app.mo"
    path.write_bytes(mo_file(messages, order))
    assert list(extract.catalogue(path)) == [
        ("app.mo", "Close the file", "Đóng tập tin & thoát"),
        ("app.mo", "%d file", "%d tập tin"),
        ("app.mo", "people with media", "người có ảnh"),
        ("app.mo", "a|b", "a|bê"),
        ("app.mo", "my_file_name _x", "tên_tập_tin _x"),
        ("app.mo", "no such <file>", "không có <file>"),
    ]


def test_json_messages(tmp_path: Path) -> None:
    english = {"@metadata": {"authors": ["A"]}, "k": "See [[Help:X|the help]].", "only": "Here"}
    vietnamese = {"@metadata": {"authors": ["B"]}, "k": "Xem <code>trợ giúp</code>.", "z": "Kia"}
    paths = [
        write(tmp_path / name, json.dumps(messages))
        for name, messages in (("en.json", english), ("vi.json", vietnamese))
    ]
    assert list(extract.json_messages(*paths)) == [("en.json", "See the help.", "Xem trợ giúp.")]


@pytest.mark.parametrize(
    ("wikitext", "plain"),
    [
        ("[[Main Page]] and [[A|b]]", "Main Page and b"),
        ("[https://example.org the site]", "the site"),
        ("[$1 your log]", "your log"),
        ("'''bold''' and ''slanted''", "bold and slanted"),
        ("{{PLURAL:$1|one edit|$1 edits}}", "$1 edits"),
        ("{{PLURAL:$1|edits}}", "edits"),
        ("{{GENDER:$2|he|she|they}} said", "he said"),
        ("{{GENDER:$2}}said", "said"),
        ("of {{SITENAME}}, {{int:go}}", "of {SITENAME}, {int_go}"),
        ("{{PLURAL:$1|[[A|one]]|{{GENDER:$2|his}} many}}", "his many"),
        ("[Nested transclusion is off]", "[Nested transclusion is off]"),
    ],
)
def test_wikitext(wikitext: str, plain: str) -> None:
    assert extract.strip_wikitext(wikitext) == plain


# Rules

WORD, VIET = "word", "từ"


def pair(english: int, vietnamese: int) -> Pair:
    return Pair(" ".join([WORD] * english), " ".join([VIET] * vietnamese))


@pytest.mark.parametrize(
    ("inside", "outside", "reason"),
    [
        (pair(3, 3), pair(2, 3), clean.TOO_SHORT),
        (pair(3, 3), pair(3, 2), clean.TOO_SHORT),
        (pair(60, 60), pair(61, 60), clean.TOO_LONG),
        (pair(60, 80), pair(60, 81), clean.TOO_LONG),
        (
            Pair("copy the file %s", "chép tập tin %s"),
            Pair("copy files %s and %d now", "chép tập tin %s"),
            clean.PLACEHOLDERS,
        ),
        (
            Pair("move page $1 now", "chuyển đổi $1 đó"),
            Pair("move page $1 now", "chuyển đổi $1 đến $2"),
            clean.PLACEHOLDERS,
        ),
        (
            Pair("press A1 B2 two times", "hãy bấm hai lần"),
            Pair("press A1 B2 C3 two times", "hãy bấm hai lần"),
            clean.NOT_WORDS,
        ),
        (
            Pair("go to the next one", "đi toi cho kế nua"),
            Pair("go to the next one", "đi toi cho nua ngay"),
            clean.NO_DIACRITICS,
        ),
        (
            Pair("run Debian Linux on it", "chạy Debian Linux ở đó"),
            Pair("run Debian Linux kernel there", "chạy Debian Linux kernel đó"),
            clean.COPIED,
        ),
        (pair(6, 3), pair(7, 3), clean.RATIO),
        (pair(4, 10), pair(4, 11), clean.RATIO),
    ],
)
def test_each_rule_just_inside_and_just_outside(inside: Pair, outside: Pair, reason: str) -> None:
    assert clean.judge(inside) == inside
    assert clean.judge(outside) == reason


@pytest.mark.parametrize(
    "placeholder",
    ["%s", "%d", "%1", "%.2f", "%(name)s", "%PRODUCTNAME", "$1", "$(ARG1)", "$name$", "${x}"]
    + ["{}", "{0}", "{name}", "{n:d}"],
)
def test_placeholders_are_recognised(placeholder: str) -> None:
    once = Pair(f"the name of it is {placeholder}", "tên của nó là gì đó")
    twice = Pair(f"the name of it is {placeholder} or {placeholder}", "tên của nó là gì đó")
    assert clean.judge(once) == once
    assert clean.judge(twice) == clean.PLACEHOLDERS


def test_a_percentage_is_no_placeholder() -> None:
    kept = Pair("from 10% up to 20% of it", "từ 10% lên đến 20% của nó")
    assert clean.judge(kept) == kept


def test_normalise() -> None:
    decomposed = unicodedata.normalize("NFD", "Tiếng  Việt")
    assert decomposed != "Tiếng  Việt"
    assert clean.normalise(f" {decomposed}\u00a0[12]\u2028là\t\u200btiếng\u00ad. ") == (
        "Tiếng Việt là tiếng."
    )


def test_markup_and_accelerators() -> None:
    assert clean.strip_markup("a<br/>b <b>c</b>&lt;d&gt; <none>") == "a b c<d> <none>"
    assert clean.strip_accelerator("Save _As") == "Save As"
    assert clean.strip_accelerator("~Đóng") == "Đóng"
    assert clean.strip_accelerator("a_b and c_d") == "a_b and c_d"
    assert clean.strip_accelerator("5 ~ 6") == "5 ~ 6"


def test_sentences_are_split_when_both_sides_have_equally_many() -> None:
    assert clean.sentence_pairs('Stop. Go on! "Now?" Yes', 'Dừng. Đi đi! "Nào?" Vâng') == [
        ("Stop.", "Dừng."),
        ("Go on!", "Đi đi!"),
        ('"Now?"', '"Nào?"'),
        ("Yes", "Vâng"),
    ]
    assert clean.sentence_pairs("Stop. Go on.", "Dừng rồi đi.") == [
        ("Stop. Go on.", "Dừng rồi đi.")
    ]
    assert clean.split_sentences("See e.g. the file v. 2 etc. and go.") == [
        "See e.g. the file v.",
        "2 etc. and go.",
    ]


def test_split_is_by_page_and_about_as_large_as_said() -> None:
    # The same on every machine: pinned, because a changed hash would mix old and new test sets.
    assert clean.split_of("libreoffice-help/swriter/main0000.html") == "train"
    splits = [clean.split_of(f"page {n}") for n in range(20_000)]
    assert splits.count("dev") / 20_000 == pytest.approx(clean.DEV_SHARE, rel=0.1)
    assert splits.count("test") / 20_000 == pytest.approx(clean.TEST_SHARE, rel=0.1)


# The IWSLT15 files


@pytest.mark.parametrize(
    ("tokenised", "plain"),
    [
        ("my life &apos;s work .", "my life's work."),
        ("I do n&apos;t , you ca n't", "I don't, you can't"),
        ("called &quot; Nothing . &quot; And", 'called "Nothing." And'),
        ("&quot; A &quot; or &quot; B &quot;", '"A" or "B"'),
        ("see ( here ) : 5 % of $ 3 ; no ?", "see (here): 5% of $3; no?"),
        ("&#91; Laughter &#93; a &amp; b", "[Laughter] a & b"),
        ("let go -- that small girl", "let go -- that small girl"),
        ("Ma &apos;am and O &apos;Reilly", "Ma'am and O'Reilly"),
        ("Tôi   rất tự hào .", "Tôi rất tự hào."),
        ("", ""),
    ],
)
def test_plain(tokenised: str, plain: str) -> None:
    assert iwslt15.plain(tokenised) == plain


ENGLISH = ("file", "page", "word", "line", "table", "row", "cell", "open", "close", "new", "old")
VIETNAMESE = ("tệp", "thẻ", "từ", "dòng", "bảng", "hàng", "ô", "mở", "đóng", "mới", "cũ", "đầu")


def sentences(words: Sequence[str], count: int, seed: int) -> list[str]:
    """Made-up sentences, tokenised, of lengths that no rule objects to."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(5, 9))) + " ." for _ in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's own data: 200, 10 and 8 pairs.

    Of the training pairs one has no English side, and one 200 words, which is too long.
    """
    data = tmp_path / "data"
    for seed, (stem, count) in enumerate((("train", 200), ("tst2012", 10), ("tst2013", 8))):
        english = sentences(ENGLISH, count, seed)
        if stem == "train":
            english[7] = ""
            english[8] = "page " * 200
        write(data / f"{stem}.en", "\n".join(english) + "\n")
        write(data / f"{stem}.vi", "\n".join(sentences(VIETNAMESE, count, 10 + seed)) + "\n")
    return data


def assert_one_clear_error(done: subprocess.CompletedProcess[str], status: int = 1) -> None:
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert "prepare.py: " in done.stderr


@needs_all
def test_wrong_and_missing_files_are_all_named(folder: Path, tmp_path: Path) -> None:
    (folder / "tst2013.vi").unlink()
    write(folder / "vocab.en", "<unk>\n")
    done = run("--data", folder, "--out", tmp_path / "out")
    assert_one_clear_error(done)
    found = iwslt15.md5_sums(folder)
    for name in ("train.en", "train.vi", "tst2012.en", "tst2012.vi", "tst2013.en"):
        assert f"{name}: MD5 is {found[name]}, should be {iwslt15.MD5[name]}" in done.stderr
    assert "tst2013.vi: missing" in done.stderr
    assert f"should be {iwslt15.OPTIONAL_MD5['vocab.en']}" in done.stderr
    assert "vocab.vi" not in done.stderr
    assert "--any-data" in done.stderr
    assert not (tmp_path / "out").exists()


def test_right_files_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = iwslt15.md5_sums(folder)
    with pytest.raises(stages.UserError, match=r"train\.en: MD5"):
        iwslt15.check(folder, sums, any_data=False)
    iwslt15.check(folder, sums, any_data=True)
    monkeypatch.setattr(iwslt15, "MD5", sums)
    iwslt15.check(folder, sums, any_data=False)


def test_sides_must_have_equally_many_lines(folder: Path) -> None:
    # U+2028 ends a line for str.splitlines, and must not here.
    write(folder / "tst2012.vi", "một\u2028hai\n" * 10)
    assert len(iwslt15.read(folder)["dev"]) == 10
    write(folder / "tst2012.vi", "một hai\n" * 9)
    with pytest.raises(stages.UserError, match=r"tst2012\.en has 10 lines and tst2012\.vi 9"):
        iwslt15.read(folder)


def test_a_corpus_must_have_text(folder: Path) -> None:
    write(folder / "tst2013.en", "\n" * 8)
    with pytest.raises(stages.UserError, match=r"tst2013\.en and tst2013\.vi"):
        iwslt15.read(folder)
    (folder / "train.vi").write_bytes(b"\xff\xfe\n")
    with pytest.raises(stages.UserError, match=r"train\.vi is not UTF-8"):
        iwslt15.read(folder)


# Stages


def fill(text: str) -> Callable[[Path], dict[str, int]]:
    def into(folder: Path) -> dict[str, int]:
        write(folder / "a.txt", text)
        return {"length": len(text)}

    return into


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_stage_runs_once_for_its_settings(tmp_path: Path) -> None:
    said: list[str] = []

    def stage(settings: dict[str, int], text: str) -> dict[str, int]:
        return stages.run_stage(
            tmp_path / "one",
            settings,
            fill(text),
            say=said.append,
            doing="writing",
            later=(tmp_path / "two",),
        )

    write(tmp_path / "two/b.txt", "made from one")
    assert stage({"n": 1}, "first") == {"length": 5}
    assert visible(tmp_path) == {"one"}, "what was made from the old stage must go with it"
    write(tmp_path / "two/b.txt", "made from one")
    assert stage({"n": 1}, "second try") == {"length": 5}
    assert (tmp_path / "one/a.txt").read_text() == "first"
    assert visible(tmp_path) == {"one", "two"}
    assert stage({"n": 2}, "third") == {"length": 5}
    assert (tmp_path / "one/a.txt").read_text() == "third"
    assert visible(tmp_path) == {"one"}
    assert said == ["one: writing", "one: finished before, with the same settings", "one: writing"]


def test_a_stage_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    def stage(settings: int, into: Callable[[Path], dict[str, int]]) -> None:
        stages.run_stage(
            tmp_path / "one",
            {"n": settings},
            into,
            say=lambda line: None,
            doing="writing",
            later=(tmp_path / "two",),
        )

    def fails(folder: Path) -> dict[str, int]:
        write(folder / "a.txt", "half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(1, fails)
    assert visible(tmp_path) == set()
    stage(1, fill("whole"))
    write(tmp_path / "two/b.txt", "made from one")
    with pytest.raises(KeyboardInterrupt):
        stage(2, fails)
    assert (tmp_path / "one/a.txt").read_text() == "whole"
    assert visible(tmp_path) == {"one", "two"}
    # What kill -9 leaves:
    write(tmp_path / ".one.partial-0123abcd/a.txt", "half")
    stage(2, fill("new"))
    assert (tmp_path / "one/a.txt").read_text() == "new"
    assert visible(tmp_path) == {"one"}


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        stages.only_one(tmp_path),
        pytest.raises(stages.UserError, match="another run"),
        stages.only_one(tmp_path),
    ):
        pass
    with stages.only_one(tmp_path):
        assert (tmp_path / ".lock").exists()


# The command


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def check_output(out: Path, vocab_size: int, too_long: int = 0) -> None:
    """Everything is there, the same pairs are in every folder, and the dictionary has its size.

    `too_long`: so many pairs of raw/train are left out of pieces/train.
    """
    assert {name for name in visible(out) if name != ".lock"} == {"raw", "spm", "pieces", "bin"}
    for split in ("train", "dev", "test"):
        raw, pieces = (
            [len(lines(out / stage / f"{split}.{side}")) for side in ("en", "vi")]
            for stage in ("raw", "pieces")
        )
        left_out = too_long if split == "train" else 0
        assert raw == [count + left_out for count in pieces]
        assert raw[0] == raw[1] > 0
    dictionary = [line.split(" ")[0] for line in lines(out / "bin/dict.en.txt")]
    assert lines(out / "bin/dict.en.txt") == lines(out / "bin/dict.vi.txt")
    assert len(set(dictionary)) == len(dictionary) == vocab_size - 4
    assert set(dictionary) == set(lines(out / "spm/spm.vocab")) - {"<unk>", "<s>", "</s>"}
    used = {
        piece
        for s in ("en", "vi")
        for line in lines(out / f"pieces/train.{s}")
        for piece in line.split(" ")
    }
    assert used <= set(dictionary)
    for split in ("train", "valid", "test"):
        for side in ("en", "vi"):
            assert (out / f"bin/{split}.en-vi.{side}.bin").stat().st_size > 0
            assert (out / f"bin/{split}.en-vi.{side}.idx").stat().st_size > 0


@needs_all
def test_own_data_from_text_to_fairseq_killed_and_resumed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["--data", folder, "--any-data", "--out", out, "--vocab-size", "40"]

    # Killed where fairseq has just been started. Its process is ended with it.
    process = subprocess.Popen(
        [sys.executable, str(PREPARE), *map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen = ""
    for line in process.stdout:
        seen += line
        if "bin: " in line:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert "--joined-dictionary" in seen
    finished = {name for name in visible(out) if not name.startswith(".")}
    assert finished == {"raw", "spm", "pieces"}
    before = {name: (out / name / "stamp.json").stat().st_mtime_ns for name in finished}

    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished before") == 3
    assert "joint dictionary: 40 entries" in done.stdout
    assert "dropped for over 128 pieces: 1" in done.stdout
    assert before == {name: (out / name / "stamp.json").stat().st_mtime_ns for name in finished}
    check_output(out, 40, too_long=1)
    assert len(lines(out / "raw/train.en")) == 199, "the pair without an English side goes"
    assert len(lines(out / "raw/dev.vi")) == 10
    assert len(lines(out / "raw/test.vi")) == 8
    first = (folder / "train.en").read_text().split("\n")[0]
    assert lines(out / "raw/train.en")[0] == first.replace(" .", ".")

    again = run(*command)
    assert again.stdout.count("finished before") == 4
    assert again.returncode == 0

    # A size that cannot be made is an error that says what can, and spoils nothing ...
    failed = run(*command[:-1], "5000")
    assert_one_clear_error(failed)
    largest = re.search(
        r"--vocab-size 5000 is too large .* at most (\d+) is possible", failed.stderr
    )
    assert largest is not None
    check_output(out, 40, too_long=1)
    # ... and what it says is true.
    assert_one_clear_error(run(*command[:-1], int(largest[1]) + 1))
    # Later stages are made again, the text is not.
    done = run(*command[:-1], largest[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished before") == 1
    check_output(out, int(largest[1]), too_long=1)


@needs_all
def test_vocabulary_too_small(folder: Path, tmp_path: Path) -> None:
    command = ["--data", folder, "--any-data", "--out", tmp_path / "out", "--vocab-size"]
    done = run(*command, 9)
    assert_one_clear_error(done)
    needed = re.search(r"--vocab-size 9 is too small .* (\d+) is needed", done.stderr)
    assert needed is not None
    assert_one_clear_error(run(*command, int(needed[1]) - 1))
    assert run(*command, needed[1]).returncode == 0


@needs_all
def test_out_cannot_be_written(folder: Path) -> None:
    done = run("--data", folder, "--any-data", "--out", folder / "train.en")
    assert_one_clear_error(done)
    assert str(folder / "train.en") in done.stderr


def test_usage() -> None:
    done = run("--any-data")
    assert_one_clear_error(done, status=2)
    assert "--data DIR" in done.stderr
    shown = run("--help").stdout
    for flag in ("--data", "--any-data", "--out", "--cache", "--vocab-size"):
        assert flag in shown


@needs_all
def test_without_debian_tools(tmp_path: Path) -> None:
    done = run("--out", tmp_path / "out", "--cache", tmp_path / "cache", PATH=str(tmp_path))
    assert_one_clear_error(done)
    assert "apt-get" in done.stderr
    assert "--data DIR" in done.stderr
    assert visible(tmp_path / "out") == {".lock"}


# Debian's tools, played by scripts: packages are tar files beside apt-get.
FAKE_APT_GET = """#!/bin/sh
while [ "$1" != update ] && [ "$1" != download ]; do
  case "$1" in -o) shift 2;; *) shift;; esac
done
echo "$@" >> {log}
[ "$1" = update ] && exit 0
cp {packages}/$2_1_all.deb . 2>/dev/null && exit 0
echo "E: Unable to locate package $2" >&2
exit 100
"""
FAKE_DPKG_DEB = '#!/bin/sh\n[ "$1" = -x ] && exec tar -xf "$2" -C "$3"\n'


def package(folder: Path, name: str, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        target = folder / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    with tarfile.open(folder / f"{name}_1_all.deb", "w") as archive:
        archive.add(folder / name / "usr", "usr")


@pytest.fixture
def debian(tmp_path: Path) -> dict[str, str]:
    """PATH of a machine whose archive has LibreOffice and Gramps alone: 300 pages of 3 sentences.

    The last sentence of every page is the same.
    """
    packages = tmp_path / "packages"
    english, vietnamese = sentences(ENGLISH, 600, 1), sentences(VIETNAMESE, 600, 2)
    pages: dict[str, dict[str, bytes]] = {"en-US": {}, "vi": {}}
    for language, texts in (("en-US", english), ("vi", vietnamese)):
        same = "the same table again ." if language == "en-US" else "cũng bảng này nữa ."
        for n in range(300):
            body = "".join(
                f'<p id="par_{i}">{text}</p>' for i, text in enumerate([*texts[2 * n :][:2], same])
            )
            path = f"usr/share/libreoffice/help/{language}/text/page{n}.html"
            pages[language][path] = page(body).encode()
    package(packages, "libreoffice-help-en-us", pages["en-US"])
    package(packages, "libreoffice-help-vi", pages["vi"])
    messages = mo_file({"": "header", "a new ~file here": "một ~tập tin mới"}, "<")
    resource = "usr/lib/libreoffice/program/resource/vi/LC_MESSAGES/sw.mo"
    package(packages, "libreoffice-l10n-vi", {resource: messages})
    messages = mo_file({"": "header", "A new File here": "tập tin mới kia"}, "<")
    package(packages, "gramps", {"usr/share/locale/vi/LC_MESSAGES/gramps.mo": messages})
    tools = tmp_path / "tools"
    log = tmp_path / "log"
    write(tools / "apt-get", FAKE_APT_GET.format(packages=packages, log=log))
    write(tools / "dpkg-deb", FAKE_DPKG_DEB)
    for tool in ("apt-get", "dpkg-deb"):
        (tools / tool).chmod(0o755)
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


@needs_all
def test_debian_corpus(debian: dict[str, str], tmp_path: Path) -> None:
    out, cache, log = tmp_path / "out", tmp_path / "cache", tmp_path / "log"
    command = ["--out", out, "--cache", cache, "--vocab-size", "50"]
    done = run(*command, **debian)
    assert done.returncode == 0, done.stderr
    check_output(out, 50)
    for name in ("maint-guide", "installation-guide", "mediawiki", "gimp"):
        assert re.search(rf"MISSING {name}: apt-get download \S+ failed", done.stdout)
    assert log.read_text().count("update") == 1
    figures = json.loads((out / "raw/stamp.json").read_text())["figures"]
    assert figures["sources"]["libreoffice-help"]["found"] == 900
    assert figures["sources"]["libreoffice-l10n"]["kept"] == 1
    assert figures["sources"]["gramps"] == {"found": 1, "sentences": 1, "kept": 0}
    # 299 of the last sentences, and Gramps' message, which LibreOffice has.
    assert figures["dropped"] == {**dict.fromkeys(clean.REASONS, 0), clean.DUPLICATE: 300}

    # Pages are where their names say, and none is on two sides.
    texts = {split: lines(out / f"raw/{split}.en") for split in ("train", "dev", "test")}
    assert sum(map(len, texts.values())) == 902 - 300
    split_of_page = [clean.split_of(f"libreoffice-help/page{n}.html") for n in range(300)]
    assert set(split_of_page) == {"train", "dev", "test"}
    for n, sentence in enumerate(sentences(ENGLISH, 600, 1)):
        assert [split for split in texts if sentence in texts[split]] == [split_of_page[n // 2]]

    # Packages are kept: made again elsewhere, those that are there are not asked for twice.
    asked = log.read_text()
    assert run(*command[2:], "--out", tmp_path / "other", **debian).returncode == 0
    assert "libreoffice" not in log.read_text()[len(asked) :]
    for split in texts:
        assert lines(out / f"raw/{split}.vi") == lines(tmp_path / f"other/raw/{split}.vi")
    assert visible(cache) == {".lock", "apt", "archives"}


@needs_all
def test_libreoffice_is_required(debian: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "packages/libreoffice-l10n-vi_1_all.deb").unlink()
    done = run("--out", tmp_path / "out", "--cache", tmp_path / "cache", **debian)
    assert_one_clear_error(done)
    assert "Unable to locate package libreoffice-l10n-vi" in done.stderr
    assert "--data DIR" in done.stderr
    assert visible(tmp_path / "out") == {".lock"}


@needs_all
def test_a_broken_package_is_named(debian: dict[str, str], tmp_path: Path) -> None:
    archives = tmp_path / "cache/archives"
    archives.mkdir(parents=True)
    broken = archives / "libreoffice-help-vi_1_all.deb"
    broken.write_bytes(b"half a download")
    done = run("--out", tmp_path / "out", "--cache", tmp_path / "cache", **debian)
    assert_one_clear_error(done)
    assert f"{broken} cannot be unpacked; delete it" in done.stderr
    assert not list((tmp_path / "cache").glob(".unpacked*"))
