from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from paramshare import ShareError
from paramshare.files import whole_file


def test_many_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    together = Barrier(4)

    def write(text: str) -> None:
        with whole_file(path) as temporary:
            temporary.write_text(text[:500])
            together.wait(60)  # all are half done
            temporary.write_text(text)

    texts = [letter * 1000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, texts))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def _fail(path: Path, error: BaseException) -> None:
    with whole_file(path) as temporary:
        temporary.write_text("half of")
        raise error


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    for error, raised, message in (
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "^stop$"),
        (OSError("full"), ShareError, "file cannot be written: full"),
    ):
        with pytest.raises(raised, match=message):
            _fail(path, error)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_permissions_are_those_of_any_file(tmp_path: Path) -> None:
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    with whole_file(tmp_path / "file") as temporary:
        temporary.unlink()  # some writers replace it by a private file
        temporary.touch(0o600)
    assert (tmp_path / "file").stat().st_mode == ordinary.stat().st_mode


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    with whole_file(path) as temporary:
        temporary.write_text("x")
    assert path.read_text() == "x"
