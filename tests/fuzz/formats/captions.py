"""Features of pictures, and COCO's captions as tasks and recipes read them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loading import load
from torch import Tensor

from fuzz.damage import damaged_bytes, damaged_json, json_text
from fuzz.formats import Format
from paramshare import ShareError
from paramshare.tasks.caption_text import words
from paramshare.tasks.captions import read_captions
from paramshare.tasks.features import Features, write_features

coco, coco_json, stages = load("coco_captioning", "corpus.coco", "coco_json", "stages")


def _make_features(folder: Path) -> None:
    def rows(ids: Any) -> list[np.ndarray]:
        return [np.full((4, 3), id, np.float16) for id in ids]

    write_features(
        folder / "split",
        [4, 7, 9],
        rows,
        width=3,
        grid=(2, 2),
        backbone={"name": "x", "weights": "y"},
        batch=2,
    )


def _damage_features(draw: random.Random, folder: Path) -> tuple[str, bool]:
    path = folder / "split" / draw.choice(["pictures.json", "pictures.json", "features.npy"])
    if path.suffix == ".json" and draw.random() < 0.8:
        made, what = damaged_json(draw, json.loads(path.read_text()))
        path.write_text(json_text(made))
    else:
        data, what = damaged_bytes(draw, path.read_bytes())
        path.write_bytes(data)
    return f"{path.name}: {what}", False


def _load_features(folder: Path, draw: random.Random) -> Tensor:
    features = Features(folder / "split")
    assert all(type(id) is int for id in features.ids), f"ids {features.ids!r:.80}"
    assert type(features.width) is int, f"a width of {features.width!r:.80}"
    cells = features.grid
    assert cells is None or len(cells) == 2 and all(type(n) is int and n > 0 for n in cells), (
        f"a grid of {cells!r:.80}"
    )
    found = [torch.from_numpy(np.array(features[id])) for id in features.ids]
    for rows in found:
        assert rows.shape[1] == features.width, f"rows {tuple(rows.shape)}"
        assert cells is None or len(rows) == cells[0] * cells[1], f"rows {tuple(rows.shape)}"
    return torch.cat(found)


_COCO = {
    "info": {"pictures": "images"},
    "images": [{"id": n, "file_name": f"{n}.jpg"} for n in (3, 5, 8)],
    "annotations": [
        {"id": n, "image_id": (3, 5, 8)[n % 3], "caption": f"a picture {n}"} for n in range(6)
    ],
}
_KARPATHY = {
    "images": [
        {
            **{"filepath": "val", "filename": f"{n}.jpg", "cocoid": n, "split": "train"},
            "sentences": [{"sentid": 10 * n + m, "raw": f"picture {m}"} for m in range(2)],
        }
        for n in (3, 5, 8)
    ]
}


def _json_format(content: Any, load: Callable[[Path], None]) -> Format:
    def make(folder: Path) -> None:
        (folder / "captions_train.json").write_text(json.dumps(content))

    def damage(draw: random.Random, folder: Path) -> tuple[str, bool]:
        path = folder / "captions_train.json"
        if draw.random() < 0.8:
            made, what = damaged_json(draw, json.loads(path.read_text()))
            path.write_text(json_text(made))
        else:
            data, what = damaged_bytes(draw, path.read_bytes())
            path.write_bytes(data)
        return what, False

    def loaded(folder: Path, draw: random.Random) -> Tensor:
        load(folder / "captions_train.json")
        return torch.empty(0)

    return Format(make, damage, loaded, (ShareError, stages.UserError))


def _check_captions(files: dict[Any, Any], captions: dict[Any, Any]) -> None:
    assert files.keys() == captions.keys()
    for id, name in files.items():
        assert type(id) is int, f"an id of {id!r:.80}"
        assert type(name) is str, f"a name of {name!r:.80}"
        assert captions[id], f"no captions of {id}"
        for caption in captions[id]:
            assert type(caption) is str, f"a caption of {caption!r:.80}"


def _official(path: Path) -> None:
    found = read_captions(path, words)
    found.settle(skip=False)
    _check_captions(found.files, found.of)


def _karpathy(path: Path) -> None:
    (found,), sides = coco.karpathy(path)
    found.settle(skip=False)
    _check_captions(found.files, found.of)
    assert set(found.files) <= set(sides)


def _references(path: Path) -> None:
    found = coco_json.read_references(path)
    _check_captions(found.files, found.captions)


FORMATS = {
    "features": Format(_make_features, _damage_features, _load_features),
    "captions": _json_format(_COCO, _official),
    "Karpathy's split": _json_format(_KARPATHY, _karpathy),
    "references": _json_format(_COCO, _references),
}
