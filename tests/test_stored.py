from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import python
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paramshare import ShareError
from paramshare.stored import read_file, write_file

CONTENT = {"words": ["one", "two"], "number": 1.5, "é": None}


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 4),
        "b": torch.randn(3, 4),
        "c": torch.tensor(True),
        "d": torch.randn(5).to(torch.bfloat16),
        "e": torch.arange(7),
        "f": torch.empty(0),
    }


def as_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return found, file.metadata()


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, tensors(), CONTENT)
    found, content = read_file(path)
    assert content == CONTENT
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, tensors(), {"words": ["one", "two"]})
    whole = path.read_bytes()
    # What is of no meaning here, and the digest's name, without which another entry is there.
    harmless = [b'format":"pt', b"sha256"]
    skipped = {whole.index(text) + i for text in harmless for i in range(len(text))}
    for position in sorted(set(range(len(whole))) - skipped):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(ShareError, match="cannot be read|damaged|no sharing plan in it"):
            read_file(path)


def _swapped(found: dict[str, Tensor], content: dict) -> None:
    found["a"], found["b"] = found["b"], found["a"]


def _renamed(found: dict[str, Tensor], content: dict) -> None:
    found["g"] = found.pop("e")


def _other_type(found: dict[str, Tensor], content: dict) -> None:
    found["a"] = found["a"].view(torch.int32)


def _other_shape(found: dict[str, Tensor], content: dict) -> None:
    found["a"] = found["a"].view(4, 3)


def _one_more(found: dict[str, Tensor], content: dict) -> None:
    found["z"] = torch.empty(0)


def _other_words(found: dict[str, Tensor], content: dict) -> None:
    content["words"].reverse()


def _other_digest(found: dict[str, Tensor], content: dict) -> None:
    content["sha256"] = None if content["sha256"] is None else 3


@pytest.mark.parametrize(
    "change",
    [_swapped, _renamed, _other_type, _other_shape, _one_more, _other_words, _other_digest],
)
def test_what_others_change_is_noticed(tmp_path: Path, change) -> None:
    path = tmp_path / "file"
    write_file(path, tensors(), CONTENT)
    found, metadata = as_safetensors(path)
    content = json.loads(metadata["paramshare"])
    change(found, content)
    save_file(found, path, {"format": "pt", "paramshare": json.dumps(content)})
    with pytest.raises(ShareError, match="file is damaged, or something else than save_model"):
        read_file(path)


def test_what_others_only_write_again_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, tensors(), CONTENT)
    found, metadata = as_safetensors(path)
    content = dict(reversed(json.loads(metadata["paramshare"]).items()))
    save_file(found, path, {"paramshare": json.dumps(content, indent=1), "author": "somebody"})
    assert read_file(path)[1] == CONTENT


def test_older_files_have_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file(tensors(), path, {"paramshare": json.dumps(CONTENT)})
    assert read_file(path)[1] == CONTENT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[1]",
        "3",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": {"b": 1, "b": 1}}',
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a": 1' + "0" * 5000 + "}",
    ],
    ids=lambda text: text[:12],
)
def test_damaged_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    save_file(tensors(), path, {"paramshare": text})
    with pytest.raises(ShareError, match="file has a damaged sharing plan in it"):
        read_file(path)


WRITE = """
import sys, torch
from pathlib import Path
from paramshare.stored import write_file
found = {name: torch.full((3,), ord(name)) for name in "abcdefgh"}
write_file(Path(sys.argv[1]), found, {"x": [1.5], "y": {}})
"""


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / str(seed) for seed in range(4)]
    for seed, path in enumerate(paths[:2]):
        done = python("-c", WRITE, path, env={**os.environ, "PYTHONHASHSEED": str(seed)})
        assert done.returncode == 0, done.stderr
    found = {name: torch.full((3,), ord(name)) for name in "abcdefgh"}
    write_file(paths[2], found, {"x": [1.5], "y": {}})
    for _ in range(8):
        write_file(paths[3], found, {"x": [1.5], "y": {}})
        assert paths[3].read_bytes() == paths[0].read_bytes()
    assert len({path.read_bytes() for path in paths}) == 1
    assert as_safetensors(paths[0])[1].keys() == {"format", "paramshare"}


def test_threads_that_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: write_file(path, tensors(), CONTENT), range(12)))
    assert read_file(path)[1] == CONTENT
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    sparse = torch.eye(3).to_sparse()
    for name, wrong in (("folder", {}), ("file", {"a": sparse}), ("no/file", {})):
        with pytest.raises(ShareError, match=f"{name} cannot be written"):
            write_file(tmp_path / name, {**tensors(), **wrong}, CONTENT)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_paths_without_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "nu\0ll"):
        with pytest.raises(ShareError, match="cannot be read"):
            read_file(path)
