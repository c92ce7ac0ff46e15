"""The table of the comparison, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pictures import Trained, plot_savings
from results import Row, markdown, put_table

ARCHS = {"transformer": "Transformer", "lstm": "LSTM", "fconv": "ConvS2S"}
MODELS = {"baseline": "plain", "veps": "VEPS", "eps": "EPS", "fairseq": "plain, fairseq's task"}
Rows = Mapping[Any, Sequence[Row]]


def show(rows: Rows, folder: Path) -> None:
    """Prints the table and writes it into README.md in `folder`, the plot into results.png."""
    text = table(rows)
    print(text)
    put_table(folder / "README.md", text)
    plot(rows, folder / "results.png")


def table(rows: Rows) -> str:
    """In Markdown: means over the seeds, with the least and the greatest; the twin of a model is
    the plain one of its architecture and size, but for a wider feed-forward."""
    head = ["model", "stored", "compression", "learning rate", "seeds", "dev perplexity"]
    head += ["BLEU", "chrF", "of the twin's BLEU", "talks: BLEU", "chrF"]
    lines = []
    for model, trained in rows.items():
        found = _scored(trained)
        if not found:
            lines.append([name(model), "", "", f"{trained[0]['lr']:g}", "", "diverged"])
            continue
        first, twin = found[0], _scored(_twin(model, rows))
        cells = [name(model), f"{first['stored']:,}", "", f"{first['lr']:g}", str(len(found))]
        cells += [_spread([row["dev_perplexity"] for row in found], 2)]
        cells += [_spread([row[score] for row in found]) for score in ("bleu", "chrf")]
        cells.append("")
        talks = [row["talks"] for row in found if "talks" in row]
        cells += [_spread([row[score] for row in talks]) for score in ("bleu", "chrf")]
        if twin:
            cells[2] = f"{twin[0]['stored'] / first['stored']:.2f}x"
            if _bleu(twin):
                cells[8] = f"{100 * _bleu(found) / _bleu(twin):.0f}%"
        lines.append(cells)
    return markdown(head, [line + [""] * (len(head) - len(line)) for line in lines])


def plot(rows: Rows, path: Path) -> None:
    """BLEU against what is stored."""
    markers = {"baseline": "o", "veps": "^", "eps": "s", "fairseq": "x"}
    trained = []
    for model, found in rows.items():
        found, twin = _scored(found), _scored(_twin(model, rows))
        if not found:
            continue
        trained.append(
            Trained(
                name(model),
                [*ARCHS].index(model.arch),
                "D" if model.size.endswith("-wide") else markers[model.model],
                found[0]["stored"],
                [row["bleu"] for row in found],
                (twin[0]["stored"], _bleu(twin)) if twin else None,
            )
        )
    if trained:  # else all have diverged
        title = "Each line joins a shared translator with its plain twin"
        plot_savings(trained, path, "BLEU of the held-out test set", title)


def name(model: Any) -> str:
    """As tables call it; the size of compare.py goes without saying."""
    size = model.size.removeprefix("compare").removeprefix("-")
    size = "wide feed-forward" if size == "wide" else size
    return ", ".join(part for part in (ARCHS[model.arch], MODELS[model.model], size) if part)


def _twin(model: Any, rows: Rows) -> Sequence[Row]:
    """None of it where the model is plain, or the twin is not there."""
    if model.model not in ("veps", "eps"):
        return ()
    return rows.get(model._replace(model="baseline", size=model.size.removesuffix("-wide")), ())


def _scored(found: Sequence[Row]) -> list[Row]:
    """Those that have not diverged."""
    return [row for row in found if "bleu" in row]


def _bleu(found: Sequence[Row]) -> float:
    return mean(row["bleu"] for row in found)


def _spread(values: Sequence[float], digits: int = 1) -> str:
    """The mean, and between what."""
    if not values:
        return ""
    text = f"{mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return text
