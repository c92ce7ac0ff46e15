"""The comparison's lines, its table in README.md, and its picture."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from time import perf_counter

import lineup
import torch
from folders import load_model
from masking import IGNORED, RATE
from pictures import new_figure, save_figure
from results import Row, markdown, put_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForMaskedLM

from paramshare.report import count_parameters


def sizes(folder: Path) -> Row:
    """What a pretrained model stores, but for its untrained pooler, and the floating-point
    operations of its encoder for one full block, as torch counts them: without the generation of
    weights, which are kept in inference."""
    whole = load_model(AutoModelForMaskedLM, folder)
    encoder = load_model(AutoModel, folder).eval()
    stored = count_parameters(whole)
    stored -= sum(p.numel() for p in whole.parameters() if not p.requires_grad)
    block = torch.zeros(1, encoder.config.max_position_embeddings, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    # The fused attention would count as nothing.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        encoder(block)
        with counter:
            encoder(block)
    return {"stored": stored, "operations": counter.get_total_flops()}


def speeds(folders: dict[str, Path], batch: int = 16, steps: int = 5) -> dict[str, float]:
    """Tokens a second of training steps, medians of rounds in which the models take turns."""
    models = {name: load_model(AutoModelForMaskedLM, folder) for name, folder in folders.items()}
    configs = [model.config for model in models.values()]
    length = min(config.max_position_embeddings for config in configs)
    ids = torch.randint(min(config.vocab_size for config in configs), (batch, length))
    labels = torch.where(torch.rand(ids.shape) < RATE, ids, IGNORED)
    optimizers = {name: AdamW(model.parameters()) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(7):
        for name, model in models.items():
            start = perf_counter()
            for _ in range(steps):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model.train()(input_ids=ids, labels=labels).loss
                loss.backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
            times[name].append(perf_counter() - start)
    return {name: steps * batch * length / median(found) for name, found in times.items()}


def show(rows: list[Row], folder: Path) -> None:
    """Prints the table and writes the plot to results.png in `folder`, and the table into its
    README.md."""
    text = table(rows)
    print(text)
    put_table(folder / "README.md", text)
    plot(rows, folder / "results.png")


def table(rows: list[Row]) -> str:
    """In Markdown: one line a model, seeds apart."""
    head = (
        "model",
        "seed",
        "stored",
        "MFLOPs a block",
        "speed",
        "masked tokens: loss",
        "accuracy, %",
    )
    head += ("WordSim-353", "SimLex-999", "analogies, %", "snippets: accuracy, %")
    lines = []
    order = list(lineup.LINEUP)
    for row in sorted(rows, key=lambda row: (order.index(row["model"]), row["seed"])):
        tuned = row["finetuned"]
        cells = [
            lineup.LINEUP[row["model"]][0],
            str(row["seed"]),
            f"{row['stored']:,}",
            f"{row['operations'] / 1e6:.0f}",
            f"{row['speed']:.2f}" if "speed" in row else "",
            f"{row['mlm_loss']:.3f}",
            f"{row['mlm_accuracy']:.1f}",
            f"{row['WordSim-353']:.1f}",
            f"{row['SimLex-999']:.1f}",
            "-" if row["analogies"] is None else f"{row['analogies']:.1f}",
            f"{mean(tuned):.1f} ({', '.join(f'{x:.1f}' for x in tuned)})",
        ]
        lines.append(cells)
    return markdown(head, lines)


def plot(rows: list[Row], path: Path) -> None:
    """The loss of each model, the best one on top; a dot a seed."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        losses.setdefault(row["model"], []).append(row["mlm_loss"])
    stored = {row["model"]: row["stored"] for row in rows}
    names = sorted(losses, key=lambda name: mean(losses[name]), reverse=True)
    figure, axes = new_figure(8, 0.4 * len(names) + 1.2)
    for place, name in enumerate(names):
        color = "C3" if name.startswith("share") else "C0"
        axes.scatter(losses[name], [place] * len(losses[name]), color=color)
    labels = [f"{lineup.LINEUP[name][0]} ({stored[name] / 1e6:.2f} M)" for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_xlabel("loss at masked tokens of held-out text (nats)")
    axes.set_title("After the same steps on the same text")
    axes.grid(alpha=0.3)
    save_figure(figure, path)
