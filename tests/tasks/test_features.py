"""Features in files: written in batches, continued, read by the id of a picture."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fairseq")

from paramshare import ShareError
from paramshare.tasks.features import Features, write_features

WIDTH = 3
MADE_BY = {"name": "made up", "weights": "0"}


def rows_of(id: int, cells: int) -> np.ndarray:
    return np.random.default_rng(id).standard_normal((cells, WIDTH)).astype(np.float16)


def write(
    folder: Path,
    cells: dict[int, int],
    *,
    batch: int = 2,
    stop_at: int | None = None,
    backbone: dict[str, str] | None = MADE_BY,
    grid: tuple[int, int] | None = None,
) -> tuple[int, list[int]]:
    """Of pictures with so many rows; fails when it comes to a picture. What was there, and made."""
    asked: list[int] = []

    def make(ids: Sequence[int]) -> list[np.ndarray]:
        if stop_at in ids:
            raise KeyboardInterrupt
        asked.extend(ids)
        return [rows_of(id, cells[id]) for id in ids]

    options = {"width": WIDTH, "grid": grid, "backbone": backbone, "batch": batch}
    before = write_features(folder, list(cells), make, **options)
    return before, asked


pictures = st.dictionaries(st.integers(0, 10**9), st.integers(1, 5), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(cells=pictures, batch=st.integers(1, 4), data=st.data())
def test_what_is_written_is_read(cells: dict[int, int], batch: int, data: st.DataObject) -> None:
    """However often the run is killed: between batches, within one, or at the very end."""
    with TemporaryDirectory() as root:
        folder = Path(root) / "deep/train"
        ids = list(cells)
        stop = data.draw(st.sampled_from([None, *ids]))
        done = 0
        if stop is not None:
            done = ids.index(stop) // batch * batch
            with pytest.raises(KeyboardInterrupt):
                write(folder, cells, batch=batch, stop_at=stop)
            assert not folder.exists()
            partial = folder.with_name("train.partial")
            # What a kill in the midst of writing leaves.
            with (partial / "features.npy").open("ab") as file:
                file.write(b"half a row"[: data.draw(st.integers(0, 10))])
            with (partial / "counts.txt").open("a") as file:
                file.write(data.draw(st.sampled_from(["", "1", "12"])))
        before, asked = write(folder, cells, batch=batch)
        assert before == done
        assert asked == ids[done:]
        assert {path.name for path in folder.iterdir()} == {"features.npy", "pictures.json"}
        assert [path.name for path in folder.parent.iterdir()] == ["train"]
        features = Features(folder)
        assert features.ids == ids
        assert len(features) == len(ids)
        assert (features.width, features.grid, features.backbone) == (WIDTH, None, MADE_BY)
        for id in ids:
            assert features[id].dtype == np.float16
            assert np.array_equal(features[id], rows_of(id, cells[id]))


def test_a_run_that_was_killed_before_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "train", {1: 2, 2: 2, 3: 2})
    assert write(tmp_path / "train", {1: 2, 2: 2, 3: 2}) == (3, [])
    assert np.array_equal(Features(tmp_path / "train")[3], rows_of(3, 2))


def test_workers_map_the_file_themselves(tmp_path: Path) -> None:
    write(tmp_path / "a", {5: 4, 6: 4}, grid=(2, 2))
    features = Features(tmp_path / "a")
    content = pickle.dumps(features)
    assert len(content) < 1000
    again = pickle.loads(content)
    assert isinstance(again[5].base, np.memmap)
    assert again.grid == (2, 2)
    assert np.array_equal(again[6], features[6])
    assert 5 in again
    assert 7 not in again
    with pytest.raises(ShareError, match=r"a has no features of picture 7"):
        again[7]


def test_replaces_what_is_there_when_it_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    write(folder, {1: 2, 2: 2})
    with pytest.raises(KeyboardInterrupt):
        write(folder, {3: 2, 4: 2, 5: 2}, stop_at=5)
    assert Features(folder).ids == [1, 2]
    write(folder, {3: 2, 4: 2, 5: 2})
    assert Features(folder).ids == [3, 4, 5]


def test_what_was_begun_for_others_is_not_continued(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    with pytest.raises(KeyboardInterrupt):
        write(folder, {1: 2, 2: 2, 3: 2}, stop_at=3)
    for cells, backbone in (
        ({1: 2, 3: 2, 2: 2}, MADE_BY),
        ({1: 2, 2: 2, 3: 2}, {**MADE_BY, "weights": "1"}),
    ):
        with pytest.raises(ShareError, match=r"train\.partial was begun for other pictures or"):
            write(folder, cells, backbone=backbone)
    assert write(folder, {1: 2, 2: 2, 3: 2}) == (2, [3])


@pytest.mark.parametrize(
    ("made", "saying"),
    [
        ([np.zeros((4, WIDTH))], "2 pictures were to be made, 1 were"),
        ([np.zeros((4, WIDTH)), np.zeros((3, WIDTH))], r"picture 8: \(3, 3\), not \(4, 3\)"),
        ([np.zeros((4, 2)), np.zeros((4, WIDTH))], r"picture 7: \(4, 2\), not \(4, 3\)"),
        ([np.zeros((4, WIDTH)), np.full((4, WIDTH), 1e6)], "picture 8 are not finite in float16"),
    ],
)
def test_what_is_made_is_checked(tmp_path: Path, made: list[np.ndarray], saying: str) -> None:
    options = {"width": WIDTH, "grid": (2, 2), "backbone": None, "batch": 2}
    with np.errstate(over="ignore"), pytest.raises(ShareError, match=saying):
        write_features(tmp_path / "train", [7, 8], lambda ids: made, **options)
    assert not (tmp_path / "train").exists()


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    with pytest.raises(ShareError, match=r"train holds no pictures\.json: make features by"):
        Features(folder)
    write(folder, {1: 2, 2: 2})
    rows, about = folder / "features.npy", folder / "pictures.json"
    whole, content = rows.read_bytes(), json.loads(about.read_text())

    def refused(saying: str, **changed: object) -> None:
        about.write_text(json.dumps({**content, **changed}))
        with pytest.raises(ShareError, match=saying):
            Features(folder)

    refused("2 ids, 1 of them different, and 3 offsets", ids=[1, 1])
    refused("2 ids, 2 of them different, and 2 offsets", offsets=[0, 2])
    refused("by its offsets picture 2 has 0 rows, not 1 or more", offsets=[0, 4, 4])
    refused("by its offsets picture 2 has -1 rows", offsets=[0, 2, 1])
    refused("picture 1 has 2 rows, not 6", grid=[2, 3])
    refused(r"shape \(4, 3\) of float16, .* but pictures\.json says \(6, 3\)", offsets=[0, 2, 6])
    refused("offsets begin with 1, not 0", offsets=[1, 2, 4])
    refused("has format 2, known is 1", format=2)
    for left in (whole[:100], b"", b"[" * 300, b"PK\3\4"):
        rows.write_bytes(left)
        refused(r"features\.npy cannot be read")
    for left in (whole[:-1], whole + b"\0"):
        rows.write_bytes(left)
        refused(rf"has {len(left)} bytes, but {len(whole)} belong to its shape \(4, 3\)")
    rows.unlink()
    refused(r"features\.npy cannot be read: .*No such file")
    for left in ("", "{", "[" * 100_000, "[1]", "3", "null", "{}", '{"format": 1}', "\xff"):
        about.write_bytes(left.encode("latin-1"))
        with pytest.raises(ShareError, match=r"pictures\.json is damaged: .*: make it again"):
            Features(folder)
    about.unlink()
    about.mkdir()
    with pytest.raises(ShareError, match=r"pictures\.json is damaged: .*Is a directory"):
        Features(folder)


WRONG = (None, True, -1, 0, 1.0, 1e400, float("nan"), 10**30, "1", "", [], {}, [None], [[0]])
KNOWN = [*(("ids", [1, id]) for id in (-1, 0, 10**30)), ("format", True), ("format", 1.0)]
FIELDS = ("ids", "width", "grid", "backbone", "offsets", "format")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_fields_of_other_types(field: str, value: object, tmp_path: Path) -> None:
    """In the place of the whole field, and of a number in it."""
    folder = tmp_path / "train"
    write(folder, {1: 2, 2: 2}, grid=(1, 2))
    about = folder / "pictures.json"
    content = json.loads(about.read_text())
    changed = [{**content, field: value}]
    if isinstance(content[field], list):
        changed.append({**content, field: [*content[field][:-1], value]})
    for content in changed:
        found = content[field]
        about.write_text(json.dumps(content))
        if (field in ("grid", "backbone") and found is None) or (field, found) in KNOWN:
            assert Features(folder).ids == content["ids"]
        else:
            with pytest.raises(
                ShareError, match=r"train/(pictures\.json is damaged|features\.npy)"
            ):
                Features(folder)
    about.write_text(json.dumps({key: x for key, x in content.items() if key != field}))
    with pytest.raises(ShareError, match=rf"pictures\.json is damaged: '{field}' is missing"):
        Features(folder)


HEADERS = {
    "{'descr': '<f2', 'fortran_order': False, 'shape': (-4, 3), }": r"shape \(-4, 3\)",
    "{'descr': '<f2', 'fortran_order': False, 'shape': (4, -3), }": r"shape \(4, -3\)",
    "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 6), }": r"shape \(2, 6\)",
    "{'descr': '<f2', 'fortran_order': False, 'shape': (12,), }": r"shape \(12,\)",
    "{'descr': '<f2', 'fortran_order': False, 'shape': (10000000000000, 3), }": "shape",
    "{'descr': '<f2', 'fortran_order': True, 'shape': (4, 3), }": "by columns, but",
    "{'descr': '>f2', 'fortran_order': False, 'shape': (4, 3), }": "of >f2",
    "{'descr': '<i2', 'fortran_order': False, 'shape': (4, 3), }": "of int16",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), }": "of float32",
    "{'descr': '|O', 'fortran_order': False, 'shape': (4, 3), }": "of object",
    "{'descr': [('a', '<f2')], 'fortran_order': False, 'shape': (4, 3), }": "of \\[",
    "{'descr': '<f2', 'fortran_order': False, 'shape': (4.0, 3), }": "cannot be read",
    "{'descr': '<f2', 'fortran_order': False, 'shape': None, }": "cannot be read",
    "{'descr': None, 'fortran_order': False, 'shape': (4, 3), }": "cannot be read|of float64",
    "{'fortran_order': False, 'shape': (4, 3), }": "cannot be read",
    "[" * 110: "cannot be read",
    "(" * 118: "cannot be read",
    "": "cannot be read",
}


@pytest.mark.parametrize("header", HEADERS)
def test_headers_that_say_something_else(header: str, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    write(folder, {1: 2, 2: 2})
    rows = folder / "features.npy"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:10] + header.encode().ljust(117) + b"\n" + whole[128:])
    with pytest.raises(ShareError, match=rf"features\.npy .*({HEADERS[header]})"):
        Features(folder)


def test_headers_with_any_byte_changed(tmp_path: Path) -> None:
    """They are refused, or say the same."""
    folder = tmp_path / "train"
    write(folder, {1: 2, 2: 2})
    path = folder / "features.npy"
    whole = path.read_bytes()
    for place in range(128):
        for byte in (0, 32, 49, 255, whole[place] ^ 1):
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of numpy, of headers that Python 2 wrote
                try:
                    found = Features(folder)
                except ShareError:
                    continue
            assert np.array_equal(found[2], rows_of(2, 2))


def test_other_formats_under_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    write(folder, {1: 2, 2: 2})
    path, rows = folder / "features.npy", np.load(folder / "features.npy")
    with path.open("wb") as file:
        np.savez(file, rows)
    with pytest.raises(ShareError, match=r"features\.npy cannot be read: .*magic"):
        Features(folder)
    with path.open("wb") as file:
        np.lib.format.write_array(file, rows, (2, 0))
    with pytest.raises(ShareError, match=r"has version \(2, 0\) of the format, known is \(1, 0\)"):
        Features(folder)
    np.save(path, rows)  # as another program may have written it
    assert np.array_equal(Features(folder)[2], rows_of(2, 2))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("counts.txt", b"2\nx\n"),
        ("counts.txt", b"2\n-2\n"),
        ("counts.txt", b"2\n2\n2\n2\n"),
        ("counts.txt", b"2\n" + b"9" * 5000 + b"\n"),
        ("counts.txt", b"2\n3\n"),
        ("counts.txt", b"\xff\n"),
        ("features.npy", b""),
        ("features.npy", bytes(128 + 2 * WIDTH * 4 - 1)),
        ("wanted.json", b""),
        ("wanted.json", b"[" * 100_000),
    ],
)
def test_what_was_begun_is_damaged(name: str, content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    with pytest.raises(KeyboardInterrupt):
        write(folder, {1: 2, 2: 2, 3: 2}, stop_at=3)
    (tmp_path / "train.partial" / name).write_bytes(content)
    with pytest.raises(ShareError, match=r"train\.partial (was begun|is damaged).*: delete it and"):
        write(folder, {1: 2, 2: 2, 3: 2})
    assert not folder.exists()
