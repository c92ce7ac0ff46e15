"""COCO's annotation files: what is no id, or no text, is named and never becomes another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fairseq")

from paramshare import ShareError
from paramshare.tasks.caption_text import words
from paramshare.tasks.captions import read_captions

NO_NUMBER = (None, True, 1.0, 1e400, -1e400, float("nan"), "7", [7], {})
NO_TEXT = (None, True, 5, 1.5, ["a"], {}, "\ud800")
NO_LIST = (None, 3, "ab", {"0": {}}, True)


@pytest.fixture
def content() -> dict[str, Any]:
    return {
        "info": {"pictures": "/pictures", "year": float("nan")},
        "images": [{"id": n, "file_name": f"{n}.jpg"} for n in (1, 2)],
        "annotations": [{"id": n, "image_id": n, "caption": f"a dog, {n}"} for n in (1, 2)],
    }


def refused(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ShareError) as error:
        read_captions(path, words)
    assert str(error.value).startswith(f"{path} is no ")
    return str(error.value)


def test_what_is_read(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    content["images"][0]["id"] = content["annotations"][0]["image_id"] = 10**30
    path.write_text(json.dumps(content))
    found = read_captions(path, words)
    assert found.folder == Path("/pictures")
    assert found.files == {10**30: "1.jpg", 2: "2.jpg"}
    assert found.of == {10**30: ["a dog, 1"], 2: ["a dog, 2"]}
    assert not found.defects
    for info in (None, {}, {"pictures": None}):
        path.write_text(json.dumps({**content, "info": info}))
        assert read_captions(path, words).folder is None


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *(("images", "id", x) for x in NO_NUMBER),
        *(("annotations", field, x) for field in ("id", "image_id") for x in NO_NUMBER),
        *(("images", "file_name", x) for x in NO_TEXT),
    ],
)
def test_fields(
    name: str, field: str, value: object, content: dict[str, Any], tmp_path: Path
) -> None:
    content[name][1][field] = value
    said = refused(tmp_path / "a.json", content)
    what = "text" if field == "file_name" else "whole number"
    assert said.endswith(f"{name}[1]: {'' if what == 'text' else 'the id '}{value!r} is no {what}")
    del content[name][1][field]
    assert refused(tmp_path / "a.json", content).endswith(f"{name}[1]: '{field}' is missing")


@pytest.mark.parametrize("value", NO_TEXT)
def test_captions_that_are_no_text(value: object, content: dict[str, Any], tmp_path: Path) -> None:
    """Can be left out, as other captions that cannot be used."""
    path = tmp_path / "a.json"
    content["annotations"].append({"id": 3, "image_id": 2, "caption": value})
    path.write_text(json.dumps(content))
    found = read_captions(path, words)
    assert found.defects == {"caption that is no text": ["3 (picture 2)"]}
    assert found.of == {1: ["a dog, 1"], 2: ["a dog, 2"]}
    del content["annotations"][2]["caption"]
    assert "annotations[2]: 'caption' is missing" in refused(path, content)


def test_other_types(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for name in ("images", "annotations"):
        for value in NO_LIST:
            said = refused(path, {**content, name: value})
            assert said.endswith(f"{name} is {value!r}, which is no list")
        for value in (None, 3, "id", [1], ["id"]):
            said = refused(path, {**content, name: [value]})
            assert said.endswith(f"{name}[0]: {value!r} is no object")
        assert f"'{name}' is missing" in refused(
            path, {key: x for key, x in content.items() if key != name}
        )
    for value in (3, "a", [], True):
        assert f"info is {value!r}, which is no object" in refused(path, {**content, "info": value})
    for value in NO_TEXT[1:]:
        said = refused(path, {**content, "info": {"pictures": value}})
        assert said.endswith(f"{value!r} is no text")
    for whole in ([], [content], 3, None, True, "images"):
        assert "which is no object" in refused(path, json.dumps(whole))


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", '{"images": [], "images": []}', "[" * 100_000, '{"a":' * 100_000),
        '{"images": [{"id": 1' + "0" * 5000 + ', "file_name": "a"}], "annotations": []}',
        '\ufeff{"images": [], "annotations": []}',
        '{"images": [{"id": 1, "id": 2, "file_name": "a"}], "annotations": []}',
    ],
    ids=lambda content: content[:30],
)
def test_what_is_no_json(content: str, tmp_path: Path) -> None:
    assert "is no JSON that can be read: " in refused(tmp_path / "a.json", content)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ShareError, match=r"none\.json is not there"):
        read_captions(tmp_path / "none.json", words)
    with pytest.raises(ShareError, match="is no JSON that can be read: .*directory"):
        read_captions(tmp_path, words)
    path = tmp_path / "a.json"
    path.write_bytes(b'{"images": "\xff"}')
    with pytest.raises(ShareError, match="is no JSON that can be read: .*utf-8"):
        read_captions(path, words)
