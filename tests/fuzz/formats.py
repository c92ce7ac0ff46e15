"""The files that the library reads: how a valid one is made, damaged, and loaded.

Loading must end in one of the format's errors, and then nothing has changed; or it gives what the
valid files give. Where a format has no digest, a change of the numbers in it cannot be noticed:
such damage is not judged by what it gives.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from zoo import batch, build

from fuzz.damage import (
    HARMLESS,
    damaged_bytes,
    damaged_json,
    damaged_pickle,
    damaged_safetensors,
    json_text,
)
from fuzz.sharing import assert_unchanged, snapshot
from paramshare import ShareError, load_model, quantize, save_model, share_from_embedding

Errors = tuple[type[Exception], ...]


@dataclass(frozen=True)
class Format:
    """make: writes valid files into a folder. damage: changes one of them, says what it did and
    whether the result can be judged. load: of the folder, which may be damaged; returns numbers."""

    name: str
    make: Callable[[Path], None]
    damage: Callable[[random.Random, Path], tuple[str, bool]]
    load: Callable[[Path, random.Random], Tensor]
    errors: Errors = (ShareError,)
    said: str = ""  # part of the messages of other RuntimeErrors that may be raised


def unchanged_or_loaded(module: nn.Module, load: Callable[[], None]) -> None:
    """Loads; where that raises, sees to it that the module is what it was."""
    before = snapshot(module)
    try:
        load()
    except Exception as error:
        assert_unchanged(before, snapshot(module), str(error)[:100])
        raise


# ---------------------------------------------------------------------- save_model

_FILE = "model.safetensors"


def _sharing(name: str) -> Callable[[nn.Module], object]:
    def share(module: nn.Module) -> object:
        table = module.embedding
        match name:
            case "virtual":
                return share_from_embedding(module, table, projection_bias=True)
            case "own columns":
                few = lambda path, owner: path.startswith("1.")  # noqa: E731
                return share_from_embedding(module, table, virtual=False, select=few)
            case "lifted":
                return share_from_embedding(module, table, embedding_dim=5, depth="none")
            case "int8":
                share_from_embedding(module, table, execution="factored")
                return quantize(module)
        return None

    return share


_MODELS = {
    "plain": "Chain",
    "virtual": "Encoder",
    "own columns": "Chain",
    "lifted": "Recurring",
    "int8": "Narrow",
}


def _saved(name: str) -> Format:
    def make(folder: Path) -> None:
        module = build(_MODELS[name]).eval()
        _sharing(name)(module)
        save_model(module, folder / _FILE)

    def damage(draw: random.Random, folder: Path) -> tuple[str, bool]:
        path = folder / _FILE
        data = path.read_bytes()
        if draw.random() < 0.4:
            made, what = damaged_bytes(draw, data)
        else:
            made, what = damaged_safetensors(draw, data, "paramshare")
        path.write_bytes(made)
        return what, True

    def load(folder: Path, draw: random.Random) -> Tensor:
        how = draw.choice(["plain", "shared", "meta"])
        with torch.device("meta" if how == "meta" else "cpu"):
            module = build(_MODELS[name], seed=1).eval()
        if how == "shared":
            _sharing(name)(module)
        unchanged_or_loaded(module, lambda: load_model(module, folder / _FILE))
        # A copy: sums over mapped memory, which is aligned less, may be rounded otherwise.
        with torch.no_grad():
            return copy.deepcopy(module)(batch()[0])

    return Format(f"save_model, {name}", make, damage, load)


# ---------------------------------------------------------------------- transformers


def _bert_config() -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    return BertConfig(vocab_size=60, num_attention_heads=2, max_position_embeddings=16, **sizes)


def _make_bert(folder: Path) -> None:
    from transformers import BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(_bert_config()).double().eval()
    share_from_embedding(model, model.get_input_embeddings())
    model.save_pretrained(folder)


def _damage_bert(draw: random.Random, folder: Path) -> tuple[str, bool]:
    if draw.random() < 0.5:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        entry = config["quantization_config"]
        entry["sharings"], what = damaged_json(draw, entry["sharings"])
        path.write_text(json_text(config))
        return f"plans: {what}", True
    return _damage_weights(draw, folder / _FILE)


# Numbers of another kind transformers takes as they are; these it must not.
_READ_FROM = r".*(projection|word_embeddings.weight|tokens.weight)"


def _damage_weights(draw: random.Random, path: Path) -> tuple[str, bool]:
    """Of a file of safetensors without a digest."""
    made, what = damaged_safetensors(draw, path.read_bytes(), "", _READ_FROM)
    path.write_bytes(made)
    return what, False


def _load_bert(folder: Path, draw: random.Random) -> Tensor:
    from transformers import BertForMaskedLM

    model = BertForMaskedLM.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        return model(batch()[0]).logits


def _make_sharebert(folder: Path) -> None:
    from paramshare.models.sharebert_pretrained import ShareBertForMaskedLM

    torch.manual_seed(0)
    ShareBertForMaskedLM(_sharebert_config()).double().eval().save_pretrained(folder)


def _sharebert_config() -> Any:
    from paramshare.models.sharebert_pretrained import ShareBertConfig

    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    return ShareBertConfig(
        **{"vocab_size": 60, "embedding_size": 6, "num_attention_heads": 2, **sizes},
        max_position_embeddings=16,
    )


def _damage_sharebert(draw: random.Random, folder: Path) -> tuple[str, bool]:
    from paramshare.models.sharebert import ShareBertConfig

    if draw.random() < 0.5:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        own = {f.name: config[f.name] for f in fields(ShareBertConfig) if f.name in config}
        made, what = damaged_json(draw, own)
        kept = {name: value for name, value in config.items() if name not in own}
        path.write_text(json_text({**kept, **made}))
        return f"config: {what}", False
    return _damage_weights(draw, folder / _FILE)


def _load_sharebert(folder: Path, draw: random.Random) -> Tensor:
    from paramshare.models.sharebert_pretrained import ShareBertForMaskedLM

    model = ShareBertForMaskedLM.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        return model(batch()[0]).logits


# ---------------------------------------------------------------------- checkpoints


def _damage_checkpoint(draw: random.Random, path: Path) -> tuple[str, bool]:
    if draw.random() < 0.3:
        data, what = damaged_bytes(draw, path.read_bytes())
        path.write_bytes(data)
        return what, False
    tree = torch.load(path, weights_only=False)
    made, what = damaged_pickle(draw, tree)
    torch.save(made, path)
    return what, any(f"make {how} " in what for how in HARMLESS)


def _make_exported(folder: Path) -> None:
    from paramshare.models.sharebert_pretrained import ShareBertForMaskedLM

    torch.manual_seed(0)
    config = _sharebert_config()
    from paramshare.models.sharebert import ShareBertConfig

    options = {f.name: getattr(config, f.name) for f in fields(ShareBertConfig)}
    state = ShareBertForMaskedLM(config).double().state_dict()
    checkpoint = {
        "task_state": {"sharebert": options},
        "model": dict(state),
        "cfg": {"task": {"data": "nowhere"}},
    }
    torch.save(checkpoint, folder / "checkpoint.pt")


def _load_exported(folder: Path, draw: random.Random) -> Tensor:
    from paramshare.models.sharebert_fairseq import export_sharebert

    model = export_sharebert(folder / "checkpoint.pt", folder / "out")
    with torch.no_grad():
        return model(batch()[0]).logits


class Translator(nn.Module):
    """As much of fairseq's translators as sharing looks at."""

    class Side(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(60, 8)
            self.dictionary = [""]
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed_tokens(tokens)
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Side(), self.Side()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(tokens) + self.decoder(tokens)


def _make_translator(folder: Path) -> None:
    from paramshare.tasks.sharing import ShareConfig, share_model

    torch.manual_seed(0)
    model = Translator().double()
    plans = share_model(model, ShareConfig())
    state = {"model": dict(model.state_dict()), "task_state": {"sharing_plans": plans}}
    torch.save(state, folder / "checkpoint.pt")


def _damage_translator(draw: random.Random, folder: Path) -> tuple[str, bool]:
    path = folder / "checkpoint.pt"
    state = torch.load(path, weights_only=False)
    if draw.random() < 0.5:
        plans, what = damaged_json(draw, state["task_state"]["sharing_plans"])
        state["task_state"]["sharing_plans"] = plans
    elif draw.random() < 0.5:
        state["model"], what = damaged_pickle(draw, state["model"], ["x"])
        torch.save(state, path)
        return what, any(f"make {how} " in what for how in HARMLESS)
    else:  # the plan that goes along with a model's state, as the bytes of its JSON
        name = draw.choice([name for name in state["model"] if "version" in name])
        plan, what = damaged_json(draw, json.loads(bytes(state["model"][name].tolist())))
        state["model"][name] = torch.tensor(list(json_text(plan).encode()))
    torch.save(state, path)
    return f"plans: {what}", True


def _load_translator(folder: Path, draw: random.Random) -> Tensor:
    from fairseq.tasks import FairseqTask

    from paramshare.tasks.sharing import SharingTask

    class Task(SharingTask, FairseqTask):
        pass

    state = torch.load(folder / "checkpoint.pt", weights_only=False)
    torch.manual_seed(1)
    model, task = Translator().double(), Task.__new__(Task)
    FairseqTask.__init__(task, None)

    def load() -> None:
        task.load_state_dict(state["task_state"])
        task.share(model, from_checkpoint=True)

    unchanged_or_loaded(model, load)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        return model(batch()[0])


def _make_released(folder: Path) -> None:
    from test_sharebert_released import folder_of

    folder_of("A", folder / "theirs")


def _damage_released(draw: random.Random, folder: Path) -> tuple[str, bool]:
    path = folder / "theirs" / "config.json"
    kind = draw.choice(["json", "json", "bytes", "weights", "weights", "vocabulary"])
    if kind == "json":
        made, what = damaged_json(draw, json.loads(path.read_text()))
        path.write_text(json_text(made))
    elif kind == "weights":
        return _damage_checkpoint(draw, folder / "theirs" / "pytorch_model.bin")
    else:
        path = path if kind == "bytes" else folder / "theirs" / "vocab.txt"
        made, what = damaged_bytes(draw, path.read_bytes())
        path.write_bytes(made)
    return f"{path.name}: {what}", False


def _load_released(folder: Path, draw: random.Random) -> Tensor:
    from test_sharebert_released import inputs

    from paramshare.models.sharebert_released import import_sharebert

    model = import_sharebert(folder / "theirs", folder / "out")
    with torch.no_grad():
        return model(**inputs("A")).logits


# ---------------------------------------------------------------------- features, captions


def _make_features(folder: Path) -> None:
    from paramshare.tasks.features import write_features

    def rows(ids: Any) -> list[np.ndarray]:
        return [np.full((4, 3), id, np.float16) for id in ids]

    write_features(
        folder / "split", [4, 7, 9], rows, width=3, grid=(2, 2), backbone={"name": "x"}, batch=2
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
    from paramshare.tasks.features import Features

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


def _json_format(name: str, content: Any, load: Callable[[Path], Any], errors: Errors) -> Format:
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

    return Format(name, make, damage, loaded, errors)


def _check_captions(files: dict[Any, Any], captions: dict[Any, Any]) -> None:
    assert files.keys() == captions.keys()
    for id, name in files.items():
        assert type(id) is int, f"an id of {id!r:.80}"
        assert type(name) is str, f"a name of {name!r:.80}"
        assert captions[id], f"no captions of {id}"
        for caption in captions[id]:
            assert type(caption) is str, f"a caption of {caption!r:.80}"


def _coco() -> list[Format]:
    from loading import load

    coco, coco_json, stages = load("coco_captioning", "corpus.coco", "coco_json", "stages")
    from paramshare.tasks.caption_text import words
    from paramshare.tasks.captions import read_captions

    def official(path: Path) -> None:
        found = read_captions(path, words)
        found.settle(skip=False)
        _check_captions(found.files, found.of)

    def karpathy(path: Path) -> None:
        (found,), sides = coco.karpathy(path)
        found.settle(skip=False)
        _check_captions(found.files, found.of)
        assert set(found.files) <= set(sides)

    def references(path: Path) -> None:
        found = coco_json.read_references(path)
        _check_captions(found.files, found.captions)

    errors = (ShareError, stages.UserError)
    return [
        _json_format("captions", _COCO, official, errors),
        _json_format("captions, Karpathy's split", _KARPATHY, karpathy, errors),
        _json_format("references", _COCO, references, errors),
    ]


# ---------------------------------------------------------------------- all of them


def of_the_library() -> list[Format]:
    return [_saved(name) for name in _MODELS]


def of_transformers() -> list[Format]:
    from safetensors import SafetensorError

    theirs: dict[str, Any] = {
        "errors": (ShareError, SafetensorError),
        "said": "`ignore_mismatched_sizes`",
    }
    return [
        Format("transformers, shared", _make_bert, _damage_bert, _load_bert, **theirs),
        Format(
            "transformers, ShareBERT", _make_sharebert, _damage_sharebert, _load_sharebert, **theirs
        ),
        Format(
            "export-sharebert",
            _make_exported,
            lambda draw, folder: _damage_checkpoint(draw, folder / "checkpoint.pt"),
            _load_exported,
        ),
        Format("released ShareBERT", _make_released, _damage_released, _load_released),
    ]


def of_fairseq() -> list[Format]:
    own = Format("fairseq", _make_translator, _damage_translator, _load_translator)
    return [replace(own, said="Error(s) in loading state_dict")]


def of_captions() -> list[Format]:
    return [Format("features", _make_features, _damage_features, _load_features), *_coco()]
