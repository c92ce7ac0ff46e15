"""The data of recipes/coco_captioning: captions, vocabularies, features, and the commands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_made_up import Coco, draw, make_coco
from commands import python
from loading import RECIPES, load, within

pytest.importorskip("fairseq")
pytest.importorskip("PIL")

from fairseq.data import Dictionary

from paramshare import ShareError
from paramshare.tasks.caption_text import CaptionText, words
from paramshare.tasks.features import Features

RECIPE = "coco_captioning"
SPLITS = ("train", "valid", "test")
prepare, features, split, stamps, stages = load(
    RECIPE, "prepare", "features", "corpus.split", "corpus.stamps", "stages"
)
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="backbones need torchvision"
)


def command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(RECIPES / RECIPE / script), *map(str, arguments)]


def run(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(RECIPES / RECIPE / script, *arguments, env={**os.environ, **environment})


def prepared(*arguments: object) -> None:
    """The command in this process, which has imported everything."""
    with within(RECIPE):
        args = prepare.parse([str(argument) for argument in arguments])
        prepare.check(args)
        prepare.prepare(args)


def assert_one_clear_error(done: subprocess.CompletedProcess[str], *saying: str) -> None:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.match(r"\w+\.py: ", done.stderr), done.stderr
    for part in saying:
        assert part in done.stderr


def read(out: Path) -> dict[str, dict[str, Any]]:
    return {s: json.loads((out / f"captions/{s}.json").read_text("utf-8")) for s in SPLITS}


def captions_of(content: dict[str, Any]) -> list[str]:
    return [annotation["caption"] for annotation in content["annotations"]]


def change(path: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text("utf-8"))
    edit(content)
    path.write_text(json.dumps(content), "utf-8")


@pytest.fixture
def coco(tmp_path: Path) -> Coco:
    return make_coco(tmp_path / "coco")


# Captions


def test_karpathy_from_files_to_captions(coco: Coco, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--karpathy", coco.karpathy, "--images", coco.images, "--out", out)
    done = run("prepare.py", *options, "--min-count", 3)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "fairseq's imports speak of what is not used here"
    made = read(out)
    given = json.loads(coco.karpathy.read_text())["images"]
    sides = {"train": {"train", "restval"}, "valid": {"val"}, "test": {"test"}}
    ids = []
    for name, content in made.items():
        own = [image for image in given if image["split"] in sides[name]]
        assert content["info"]["pictures"] == str(coco.images)
        assert content["images"] == [
            {"id": image["cocoid"], "file_name": f"{image['filepath']}/{image['filename']}"}
            for image in own
        ]
        expected = [(i["cocoid"], s["raw"]) for i in own for s in i["sentences"]]
        found = [(a["image_id"], a["caption"]) for a in content["annotations"]]
        assert found == expected
        ids += [annotation["id"] for annotation in content["annotations"]]
    assert len(ids) == len(set(ids))

    dictionary = Dictionary.load(str(out / "captions/dict.txt"))
    counts = Counter(word for text in captions_of(made["train"]) for word in words(text))
    kept = {word: count for word, count in counts.items() if count >= 3}
    entries = dictionary.symbols[dictionary.nspecial :]
    assert dict(zip(entries, dictionary.count[dictionary.nspecial :], strict=True)) == kept
    assert entries == sorted(kept, key=lambda word: (-kept[word], word))
    unknown = sum(count for count in counts.values() if count < 3)
    assert re.search(rf"train +│ +{len(made['train']['images'])} │.*│ +{unknown} │", done.stdout)

    before = (out / "captions/train.json").stat().st_mtime_ns
    prepared(*options, "--min-count", 3)
    assert (out / "captions/train.json").stat().st_mtime_ns == before
    prepared(*options)
    assert len((out / "captions/dict.txt").read_text().split("\n")) < len(entries)


def test_coco_can_be_read_by_its_own_tools(coco: Coco, tmp_path: Path) -> None:
    tools = pytest.importorskip("pycocotools.coco")
    out = tmp_path / "out"
    prepared("--karpathy", coco.karpathy, "--images", coco.images, "--out", out)
    captions = tools.COCO(str(out / "captions/test.json"))
    (first, *_) = captions.getImgIds()
    assert captions.imgToAnns[first]


def test_official_files(coco: Coco, tmp_path: Path) -> None:
    """The pictures of the second file become valid and test; here all lie in one folder."""
    for path in list(coco.images.glob("*/*")):
        path.rename(coco.images / path.name)
    out = tmp_path / "out"
    options = ("--annotations", coco.train, coco.val, "--images", coco.images, "--out", out)
    done = run("prepare.py", *options)
    assert done.returncode == 0, done.stderr
    made = read(out)
    given = [json.loads(path.read_text())["images"] for path in (coco.train, coco.val)]
    assert [i["id"] for i in made["train"]["images"]] == [i["id"] for i in given[0]]
    halves = [{i["id"] for i in made[name]["images"]} for name in ("valid", "test")]
    assert all(halves)
    assert not set.intersection(*halves)
    assert set.union(*halves) == {i["id"] for i in given[1]}
    for content in made.values():
        assert all((coco.images / image["file_name"]).is_file() for image in content["images"])


def test_halves_depend_on_nothing_but_the_id() -> None:
    sides = split.halves(dict.fromkeys(range(4000), ""))
    assert Counter(sides.values())["valid"] / 4000 == pytest.approx(0.5, abs=0.03)
    assert [id for id in range(9) if sides[id] == "valid"] == [2, 4, 6], (
        "a changed hash would mix old and new test sets"
    )


def test_pieces(coco: Coco, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    out = tmp_path / "out"
    options = ("--karpathy", coco.karpathy, "--images", coco.images, "--out", out)
    with pytest.raises(stages.UserError, match="--pieces 5000 is too large .* at most") as error:
        prepared(*options, "--pieces", 5000)
    assert not (out / "captions").exists()
    largest = int(re.search(r"at most (\d+)", str(error.value))[1])
    prepared(*options, "--pieces", largest)
    with pytest.raises(stages.UserError, match=r"--pieces 3 is too small .* \d+ are needed"):
        prepared(*options, "--pieces", 3)
    text = CaptionText((out / "captions/pieces.model").read_bytes())
    dictionary = Dictionary.load(str(out / "captions/dict.txt"))
    assert len(dictionary) - dictionary.nspecial == largest
    for content in read(out).values():
        for caption in captions_of(content):
            pieces = text.split(caption)
            assert dictionary.unk() not in map(dictionary.index, pieces)
            assert text.join(pieces) == " ".join(words(caption))


# What is wrong with them


def spoil(coco: Coco) -> dict[str, int]:
    """Of each kind of defect some; how many."""
    whole = (coco.images / "train2014/001.jpg").read_bytes()
    (coco.images / "train2014/001.jpg").write_bytes(whole[: len(whole) // 2])
    (coco.images / "train2014/002.jpg").write_text("no picture")
    (coco.images / "val2014/006.jpg").unlink()

    def edit(content: Any) -> None:
        images = content["images"]
        images[0]["sentences"][0]["raw"] = " ... "
        images[3]["sentences"][1]["sentid"] = images[3]["sentences"][0]["sentid"]
        images[4]["sentences"] = []
        images.append(dict(images[5], sentences=[]))

    change(coco.karpathy, edit)
    return {
        **{"broken picture": 2, "missing picture": 1, "empty caption": 1, "caption id twice": 1},
        **{"picture without caption": 1, "picture id twice": 1},
    }


def test_defects_are_counted_and_can_be_left_out(coco: Coco, tmp_path: Path) -> None:
    kinds = spoil(coco)
    out = tmp_path / "out"
    options = ("--karpathy", coco.karpathy, "--images", coco.images, "--out", out)
    options += ("--min-count", 1)
    done = run("prepare.py", *options)
    counted = [f"{count} x {kind}: " for kind, count in kinds.items()]
    assert_one_clear_error(done, f"{coco.karpathy} has defects", *counted, "--skip-bad")
    assert "107 (train2014/001.jpg), 114 (train2014/002.jpg)" in done.stderr
    assert [path.name for path in out.iterdir()] == [".lock"]

    done = run("prepare.py", *options, "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert f"{coco.karpathy}: left out" in done.stdout
    for line in counted:
        assert line in done.stdout
    made = read(out)
    pictures = [image["id"] for content in made.values() for image in content["images"]]
    assert sorted(pictures) == sorted({100 + 7 * n for n in range(12)} - {107, 114, 128, 142})
    assert not any(text == " ... " for content in made.values() for text in captions_of(content))


def test_captions_without_pictures(coco: Coco, tmp_path: Path) -> None:
    def edit(content: Any) -> None:
        content["annotations"].append({"id": 999, "image_id": 999, "caption": "a cat"})

    change(coco.train, edit)
    change(coco.val, lambda content: content["images"].append({"id": 100, "file_name": "a.jpg"}))
    options = ("--annotations", coco.train, coco.val, "--images", coco.images)
    options += ("--out", tmp_path / "out")
    with pytest.raises(ShareError, match=r"1 x caption without picture: 999 \(picture 999\)"):
        prepared(*options)
    prepared(*options, "--skip-bad", "--min-count", 1)
    made = read(tmp_path / "out")
    assert 100 in {image["id"] for image in made["train"]["images"]}
    assert "a cat" not in captions_of(made["train"])


@pytest.mark.parametrize(
    ("content", "saying"),
    [
        ("[]", "is no file of Karpathy's split"),
        ('{"images": [{"filename": "a.jpg"}]}', "is no file of Karpathy's split"),
        ('{"images": {}}', "is no file of Karpathy's split.*: images is {}, which is no list"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: str, saying: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(stages.UserError, match=saying):
        prepared("--karpathy", tmp_path / "a.json", "--images", tmp_path, "--out", tmp_path / "out")
    assert not (tmp_path / "out/captions").exists()


@pytest.mark.parametrize("content", ['{"images": [', "[" * 100_000, '{"images": [], "images": []}'])
def test_files_that_are_no_json(tmp_path: Path, content: str) -> None:
    path = tmp_path / "captions_a.json"
    path.write_text(content)
    for given in (("--karpathy", path), ("--annotations", path, path)):
        with pytest.raises(ShareError, match=rf"{path} is no JSON that can be read: "):
            prepared(*given, "--images", tmp_path, "--out", tmp_path / "out")


NO_NUMBER = (None, True, 1.0, 1e400, -1e400, float("nan"), "7", [7], {})
NO_TEXT = (None, True, 5, 1.5, ["a"], {}, "\ud800")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, x) for field in ("cocoid", "sentid") for x in NO_NUMBER),
        *((field, x) for field in ("filepath", "filename", "split") for x in NO_TEXT),
        ("split", "dev"),
        *(("sentences", x) for x in (None, 3, "ab", {}, [3], [None], [["raw"]])),
    ],
)
def test_fields_of_karpathy(field: str, value: object, coco: Coco, tmp_path: Path) -> None:
    """What is no id, or no text, would become another one."""

    def edit(content: Any) -> None:
        image = content["images"][2]
        (image["sentences"][1] if field == "sentid" else image)[field] = value

    change(coco.karpathy, edit)
    options = ("--karpathy", coco.karpathy, "--images", coco.images, "--out", tmp_path / "out")
    place = r"images\[2\]: " + (r"sentences\[1\]: " if field == "sentid" else "")
    with pytest.raises(stages.UserError, match=rf"{coco.karpathy} is no file of.*: {place}"):
        prepared(*options)


@pytest.mark.parametrize("field", ["cocoid", "sentid", "filename", "split", "sentences", "raw"])
def test_fields_of_karpathy_that_are_missing(field: str, coco: Coco, tmp_path: Path) -> None:
    def edit(content: Any) -> None:
        image = content["images"][0]
        image.pop("imgid")
        (image["sentences"][0] if field in ("sentid", "raw") else image).pop(field)

    change(coco.karpathy, edit)
    options = ("--karpathy", coco.karpathy, "--images", coco.images, "--out", tmp_path / "out")
    with pytest.raises(stages.UserError, match=r"is no file of.*: images\[0\]: "):
        prepared(*options)


def test_what_can_be_said_at_once(coco: Coco, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert_one_clear_error(run("prepare.py", "--out", out, "--min-count", 0), "must be at least 1")
    karpathy = ("--karpathy", coco.karpathy)
    for options, saying in (
        ((*karpathy, "--images", tmp_path / "x"), "x is not a folder"),
        (("--karpathy", tmp_path / "y.json", "--images", coco.images), r"y\.json is not there"),
    ):
        with pytest.raises(stages.UserError, match=saying):
            prepared(*options, "--out", out)
    for wrong in (
        karpathy,
        ("--images", coco.images),
        (*karpathy, "--pieces", 9, "--min-count", 2),
    ):
        with pytest.raises(SystemExit):
            prepared(*wrong, "--out", out)
    assert not out.exists()


def test_splits_and_words_there_must_be(coco: Coco, tmp_path: Path) -> None:
    options = ("--karpathy", coco.karpathy, "--images", coco.images, "--out", tmp_path / "out")
    with pytest.raises(stages.UserError, match="--min-count 900: no word .* occurs over 2. times"):
        prepared(*options, "--min-count", 900)

    def edit(content: Any) -> None:
        content["images"] = [x for x in content["images"] if x["split"] != "test"]

    change(coco.karpathy, edit)
    with pytest.raises(stages.UserError, match="no picture for test"):
        prepared(*options)


# The pictures of the package

APT_GET = """#!/bin/sh
while [ "$1" != update ] && [ "$1" != download ]; do shift; done
if [ "$1" = update ]; then exit 0; fi
cp {packages}/$2_1_all.deb . 2>/dev/null && exit 0
echo "E: Unable to locate package $2" >&2
exit 100
"""
DPKG_DEB = '#!/bin/sh\nexec tar -xf "$2" -C "$3"\n'


def add_stamp(folder: Path, name: str, caption: str | None, **picture: str) -> None:
    path = draw(folder / f"{name}.png", **{"shape": "circle", "ground": "white", **picture})
    if caption is not None:
        path.with_suffix(".txt").write_text(f"{caption}\nvi.utf8=một thứ\n", "utf-8")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """What dpkg-deb unpacks, as a tar: 60 things, letters, a mirrored and a repeated picture."""
    folder = tmp_path / "stamps"
    for n in range(60):
        add_stamp(folder, f"things/thing{'abcdefghij'[n % 10] * (n // 10 + 1)}",
                  f"A thing, the {n}.", colour=f"#0000{n:02x}")  # fmt: skip
    add_stamp(folder, "symbols/letters/a", "a", colour="#110000")
    add_stamp(folder, "town/flags/france", "France.", colour="#120000")
    add_stamp(folder, "things/thinga_mirror", None, colour="#130000")
    add_stamp(folder, "unlike/again", "The same picture.", colour="#000000")
    path = tmp_path / "packages" / f"{stamps.PACKAGE}_1_all.deb"
    path.parent.mkdir()
    with tarfile.open(path, "w") as archive:
        archive.add(folder, stamps.STAMPS)
    return path


def test_stamps(package: Path, tmp_path: Path) -> None:
    tools, out = tmp_path / "tools", tmp_path / "out"
    tools.mkdir()
    for name, script in (("apt-get", APT_GET), ("dpkg-deb", DPKG_DEB)):
        (tools / name).write_text(script.format(packages=package.parent))
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    options = ("--out", out, "--cache", tmp_path / "cache")
    done = run("prepare.py", *options, **environment)
    assert done.returncode == 0, done.stderr
    for line in ("60 pictures", "2 symbols and flags", "1 without caption", "1 repeated"):
        assert f"{stamps.PACKAGE}: {line}" in done.stdout
    made = read(out)
    names = [image["file_name"] for content in made.values() for image in content["images"]]
    assert len(names) == len(set(names)) == 60
    assert not any("mirror" in name or "symbols" in name for name in names)
    for content in made.values():
        assert content["info"]["pictures"] == str(out / "pictures")
        assert all((out / "pictures" / image["file_name"]).is_file() for image in content["images"])
    assert re.fullmatch(r"A thing, the \d+\.", captions_of(made["train"])[0])
    assert 30 < len(made["train"]["images"]) < 60
    assert " 1\n" in (out / "captions/dict.txt").read_text(), "every word is kept"

    package.unlink()
    done = run("prepare.py", "--out", tmp_path / "b", "--cache", tmp_path / "c", **environment)
    assert_one_clear_error(
        done, f"Unable to locate package {stamps.PACKAGE}", "give pictures of your own"
    )


def test_pictures_of_one_thing_stay_together() -> None:
    names = [
        *("a/flower1", "a/flower10", "a/grave-a", "a/grave-j", "b/man240a", "b/man200b", "b/man"),
        *("a/cat-2", "a/cat", "c/cat", "a/747"),
    ]
    groups: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "_side", lambda place: place)
        for id, side in split.by_picture({n: f"{x}.png" for n, x in enumerate(names)}).items():
            groups.setdefault(side, []).append(names[id])
    assert sorted(groups.values()) == sorted(
        [
            ["a/flower1", "a/flower10"],
            ["a/grave-a", "a/grave-j"],
            ["b/man240a", "b/man200b", "b/man"],
            ["a/cat-2", "a/cat"],
            ["c/cat"],
            ["a/747"],
        ]
    )
    shares = Counter(split.by_picture({n: f"{n}x/a.png" for n in range(4000)}).values())
    assert shares["valid"] / 4000 == pytest.approx(0.1, abs=0.02)
    assert shares["test"] / 4000 == pytest.approx(0.2, abs=0.02)


# Features

BACKBONE = "squeezenet1_1"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "squeezenet.pth"
    torch.save(models.get_model(BACKBONE, weights=None).state_dict(), path)
    return path


@pytest.fixture
def data(coco: Coco, tmp_path: Path) -> Path:
    options = ("--karpathy", coco.karpathy, "--images", coco.images, "--min-count", 1)
    prepared(*options, "--out", tmp_path / "out")
    return tmp_path / "out"


def made(data: Path, weights: Path, *more: object) -> Path:
    """features.py in this process."""
    options = ("--data", data, "--backbone", BACKBONE, "--weights", weights, *more)
    with within(RECIPE):
        features.make(features.parse([str(option) for option in options]))
    return data / "features" / BACKBONE


@needs_torchvision
def test_features_are_those_of_the_network(data: Path, weights: Path, coco: Coco) -> None:
    import torch
    from PIL import Image

    from paramshare.models.backbones import make_backbone

    done = run(
        "features.py", "--data", data, "--backbone", BACKBONE, "--weights", weights, "--batch", 5
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert re.search(r"train: 8 pictures, \d+ MB, \d+ pictures a second\n", done.stdout)
    backbone = make_backbone(BACKBONE, str(weights))
    for name, content in read(data).items():
        found = Features(data / "features" / BACKBONE / name)
        assert found.ids == [image["id"] for image in content["images"]]
        assert (found.grid, found.backbone) == (backbone.grid, backbone.identity)
        for image in content["images"]:
            with Image.open(coco.images / image["file_name"]) as picture, torch.inference_mode():
                expected = backbone(backbone.transform(picture)[None])[0].numpy()
            np.testing.assert_allclose(found[image["id"]], expected, atol=1e-2, rtol=1e-2)


@needs_torchvision
def test_features_are_made_once(
    data: Path, weights: Path, coco: Coco, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(data, weights)
    capsys.readouterr()
    made(data, weights)
    assert capsys.readouterr().out.count("finished before") == 3
    rows = folder / "valid/features.npy"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-1])
    made(data, weights)
    assert capsys.readouterr().out.count("finished before") == 2
    assert rows.read_bytes() == whole


@needs_torchvision
def test_features_after_a_kill(data: Path, weights: Path) -> None:
    expected = {name: (made(data, weights) / name / "features.npy").read_bytes() for name in SPLITS}
    folder = data / "features" / BACKBONE
    for name in SPLITS:
        for path in (folder / name).iterdir():
            path.unlink()
        (folder / name).rmdir()
    counts = folder / "train.partial/counts.txt"
    options = ("--data", data, "--backbone", BACKBONE, "--weights", weights, "--batch", 1)
    process = subprocess.Popen(
        command("features.py", *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (counts.exists() and counts.read_text()):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "test").exists(), "it was not killed in the midst of its work"
    made(data, weights, "--batch", 1)
    for name in SPLITS:
        assert (folder / name / "features.npy").stat().st_size == len(expected[name])
        found = Features(folder / name)
        assert np.isfinite(found[found.ids[-1]]).all()


@needs_torchvision
def test_a_broken_picture_is_named_and_the_rest_is_kept(
    data: Path, weights: Path, coco: Coco, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = coco.images / "train2014/005.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:400])
    with pytest.raises(stages.UserError) as error:
        made(data, weights, "--batch", 2)
    assert f"{broken} is no picture that can be read" in str(error.value)
    assert f"delete {data / 'captions'} and run prepare.py with --skip-bad" in str(error.value)
    broken.write_bytes(whole)
    made(data, weights, "--batch", 2)
    assert "train: 8 pictures" in (said := capsys.readouterr().out)
    assert "; 4 were made before" in said


@needs_torchvision
def test_features_without_captions(tmp_path: Path) -> None:
    assert_one_clear_error(
        run("features.py", "--data", tmp_path), f"{tmp_path / 'captions'} is not there: run prepare"
    )
    assert list(tmp_path.iterdir()) == []
