"""The file of a model: safetensors, with what the tensors do not say as JSON in its metadata.

A digest of all of it stands there, too: tensors of one shape may change places, and bits may flip,
without anything else in the file showing it. Equal content gives equal bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paramshare.errors import ShareError
from paramshare.files import whole_file

_KEY = "paramshare"
_DIGEST = "sha256"


def write_file(path: Path, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    """Writes contiguous tensors in CPU memory, and JSON-able data. Raises ShareError."""
    with whole_file(path) as temporary:
        try:
            text = json.dumps({**content, _DIGEST: _digest(tensors, content)})
            save_file(tensors, temporary, {"format": "pt", _KEY: text})
        except (RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise ShareError(f"{path} cannot be written: {error}") from None
        _sort_metadata(temporary)


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, memory-mapped, and the data. Raises ShareError where there is no such file, or
    its digest is not that of its content; older files have none."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
        raise ShareError(f"{path} cannot be read: {error}") from None
    if metadata is None:
        raise ShareError(f"{path} has no sharing plan in it: it is no file of save_model")
    try:
        content = json.loads(metadata, object_pairs_hook=_unique, parse_constant=_refuse)
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} instead of an object")
        digest = content.pop(_DIGEST, None)
        intact = digest is None or digest == _digest(tensors, content)
    except (ValueError, RecursionError) as error:
        raise ShareError(f"{path} has a damaged sharing plan in it: {error!r}") from None
    if not intact:
        raise ShareError(
            f"{path} is damaged, or something else than save_model has changed it: its digest is "
            "not that of its content; get the file again"
        )
    return tensors, content


def _digest(tensors: dict[str, Tensor], content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            # The memory itself: a copy of a mapped file would be all of it once more.
            memory = ctypes.c_ubyte * (tensor.numel() * tensor.element_size())
            digest.update(memory.from_address(tensor.data_ptr()))
    return digest.hexdigest()


def _sort_metadata(path: Path) -> None:
    """safetensors writes the entries of the metadata in an order of chance."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length
        file.seek(8)
        file.write(text.ljust(length))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an entry that stands there twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
