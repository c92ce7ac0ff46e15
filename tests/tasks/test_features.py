"""Features in files: written in batches, continued, read by the id of a picture."""

from __future__ import annotations

import json
import pickle
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
    refused(r"damaged \(offsets\)", offsets=[0, 4, 4])
    refused(r"shape \(4, 3\) of float16, but pictures\.json says \(6, 3\)", offsets=[0, 2, 6])
    refused("damaged", offsets=[0, 2, None])
    refused("has format 2, known is 1", format=2)
    for left in (whole[:-1], whole[:100], b""):
        rows.write_bytes(left)
        refused(r"features\.npy cannot be read")
    rows.unlink()
    refused(r"features\.npy cannot be read: .*No such file")
    about.write_text("{")
    with pytest.raises(ShareError, match=r"pictures\.json is damaged"):
        Features(folder)
