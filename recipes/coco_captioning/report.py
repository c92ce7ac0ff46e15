"""What the comparison measures of a captioner, its table and its picture."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import caption
from checkpoints import check_whole
from coco_json import read_references, read_results
from pictures import Trained, plot_savings
from results import Row, markdown, put_table
from scoring import score_captions
from stages import UserError
from train import BACKBONE

CAPTIONS = "test.json"  # in the folder of a model
NAMES = {"transformer": "Transformer", "lstm": "LSTM", "fconv": "ConvS2S"}
SHOWN = ("BLEU-4", "ROUGE-L", "CIDEr")
BATCH, ROUNDS, TOKENS = 16, 7, 8


def measure(folder: Path, args: argparse.Namespace) -> Row:
    """Parameters, CIDEr of validation, scores of the test pictures. Writes CAPTIONS."""
    from fairseq import checkpoint_utils

    from paramshare.report import count_parameters
    from paramshare.tasks.caption import CHECKPOINT, CaptionModel

    check_whole(folder / CHECKPOINT)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(folder / CHECKPOINT))
    if caption.main([str(folder), "--data", str(args.data)]):
        raise UserError(f"{folder} was trained, but caption.py failed, see above")
    references = read_references(args.data / "captions" / "test.json")
    scores = score_captions(references.captions, read_results(folder / CAPTIONS, references))
    return {
        "stored": count_parameters(CaptionModel(folder).model),
        "valid_cider": state["extra_state"]["best"],
        "scores": _rounded(scores.table),
        "tokens": scores.tokenisation,
    }


def nearest(args: argparse.Namespace) -> Row:
    """Scores of what needs no training: the caption of the most similar picture of train, by the
    cosine of the mean of its features."""
    import numpy as np

    from paramshare.tasks.features import Features

    def means(split: str) -> tuple[list[int], Any]:
        features = Features(args.data / "features" / BACKBONE / split)
        rows = [np.asarray(features[id], np.float32).mean(0) for id in features.ids]
        return features.ids, np.stack([row / np.linalg.norm(row) for row in rows])

    references, known = (
        read_references(args.data / "captions" / f"{split}.json") for split in ("test", "train")
    )
    (ids, asked), (others, there) = means("test"), means("train")
    said = {
        id: known.captions[others[best]][0]
        for id, best in zip(ids, (asked @ there.T).argmax(1), strict=True)
    }
    return {"scores": _rounded(score_captions(references.captions, said).table)}


def speeds(folders: Mapping[Any, Path], args: argparse.Namespace) -> dict[Any, float]:
    """Captions of TOKENS tokens a second by beam search, for what models stop at is no measure of
    speed; in batches of test pictures whose features are in memory: medians of rounds in which the
    models take turns."""
    from paramshare.tasks.caption import CaptionModel
    from paramshare.tasks.features import Features
    from paramshare.tasks.pictures import FeatureSources

    models = {name: CaptionModel(folder) for name, folder in folders.items()}
    features = Features(args.data / "features" / BACKBONE / "test")
    sources = [FeatureSources(features).load(picture) for picture in features.ids[: 4 * BATCH]]
    times: dict[Any, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            started = time.perf_counter()
            for start in range(0, len(sources), BATCH):
                part = sources[start : start + BATCH]
                model.generate(part, max_len_b=TOKENS, min_len=TOKENS)
            times[name].append(time.perf_counter() - started)
    return {name: len(sources) / median(found) for name, found in times.items()}


def show(rows: Mapping[Any, Sequence[Row]], nearest: Row | None, folder: Path) -> None:
    """Prints the table and writes it into README.md in `folder`, the plot into results.png."""
    text = table(rows, nearest)
    print(text)
    put_table(folder / "README.md", text)
    plot(rows, folder / "results.png")


def table(rows: Mapping[Any, Sequence[Row]], nearest: Row | None) -> str:
    """In Markdown: scores are means over the seeds, with their standard deviation; the plain twin
    of a model is the one of its architecture and size."""
    head = ["model", "stored", "compression", "learning rate", "seeds", *SHOWN]
    head += ["of the twin's CIDEr", "captions a second, twin = 1"]
    lines = []
    for model, found in rows.items():
        twin = rows.get(model._replace(model="baseline"))
        first = found[0]
        cells = [_name(model), f"{first['stored']:,}", "", f"{first['lr']:g}", str(len(found))]
        cells += [_spread(found, name) for name in SHOWN]
        cells += ["", ""]
        if twin and model.model != "baseline":
            cells[2] = f"{twin[0]['stored'] / first['stored']:.2f}x"
            cells[-2] = f"{100 * _mean(found, 'CIDEr') / _mean(twin, 'CIDEr'):.0f}%"
            if "speed" in first and "speed" in twin[0]:
                cells[-1] = f"{first['speed'] / twin[0]['speed']:.2f}"
        lines.append(cells)
    if nearest:
        scores = [f"{nearest['scores'][name]:.1f}" for name in SHOWN]
        lines.append(["caption of the most similar picture", *[""] * 4, *scores, "", ""])
    return markdown(head, lines)


def plot(rows: Mapping[Any, Sequence[Row]], path: Path) -> None:
    """CIDEr against what is stored."""
    markers = {("small", "baseline"): "o", ("wide", "baseline"): "D"}
    markers |= {("small", "veps"): "^", ("wide", "eps"): "s"}
    trained = []
    for model, found in rows.items():
        twin = model.model != "baseline" and rows.get(model._replace(model="baseline"))
        trained.append(
            Trained(
                _name(model),
                [*NAMES].index(model.arch),
                markers[model.size, model.model],
                found[0]["stored"],
                [row["scores"]["CIDEr"] for row in found],
                (twin[0]["stored"], _mean(twin, "CIDEr")) if twin else None,
            )
        )
    title = "Each line joins a shared captioner with its plain twin"
    plot_savings(trained, path, "CIDEr of test pictures", title)


def _rounded(table: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in table.items()}


def _name(model: Any) -> str:
    kind = {"baseline": "plain", "veps": "VEPS", "eps": "EPS"}[model.model]
    return f"{NAMES[model.arch]}, {model.size}, {kind}"


def _mean(found: Sequence[Row], name: str) -> float:
    return mean(row["scores"][name] for row in found)


def _spread(found: Sequence[Row], name: str) -> str:
    values = [row["scores"][name] for row in found]
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
