"""The whole pipeline on real text in bounded time: prepare, train two models, translate, compare.

    make demo                     (or: python recipes/iwslt15_envi/demo.py --minutes 5)

Trains the unshared Transformer and its twin whose weights are read from its embedding, each for
the given time. A table, ten translations, columns.png and loss.png go to the folder demo/. It shows
that everything works, not how good the models get: for that they train for hours.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import prepare
import score
import train
from pictures import new_figure, save_figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = ("baseline", "veps")
NAMES = {"baseline": "unshared twin", "veps": "shared (VEPS)"}
# For two cores and a few minutes: a model and batches small enough for many updates. The learning
# rate takes the first third of them to its peak: three times as steep, the shared model stays on
# the plateau where every model begins.
SIZE, TOKENS, UPDATES_A_MINUTE = "demo", 2000, 200


@dataclass
class Run:
    """A finished training: seconds, stored parameters, (update, loss in bits) as it went on."""

    seconds: float
    stored: int
    losses: list[tuple[int, float]]


def fit(model: str, data: Path, out: Path, minutes: float, seed: int, console: Console) -> Run:
    """Trains one model from the beginning, showing how far it is."""
    command = train.command(
        "transformer",
        model,
        SIZE,
        data / "bin",
        out,
        warmup=max(20, int(minutes * UPDATES_A_MINUTE / 3)),
        minutes=minutes,
        tokens=TOKENS,
        seed=seed,
        extra=("--no-last-checkpoints",),
    )
    (out / "checkpoint_best.pt").unlink(missing_ok=True)  # fairseq would go on from it
    log, losses, stored = [], [], 0
    started = time.monotonic()
    with (
        Progress(console=console, transient=True) as progress,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        ) as process,
    ):
        bar = progress.add_task(NAMES[model], total=minutes * 60)
        for line in process.stdout:
            log.append(line)
            if found := re.search(r"num\. shared model params: ([\d,]+)", line):
                stored = int(found[1].replace(",", ""))
            if found := re.search(r"train_inner .* nll_loss=([\d.]+).* num_updates=(\d+)", line):
                losses.append((int(found[2]), float(found[1])))
                what = f"{NAMES[model]}: update {found[2]}, loss {found[1]} bits a piece"
                progress.update(bar, description=what, completed=time.monotonic() - started)
                if not console.is_terminal and len(losses) % 5 == 0:
                    console.print(f"  {what}", highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.log").write_text("".join(log), "utf8")
    if process.returncode or not (out / "checkpoint_best.pt").exists():
        raise SystemExit(f"training failed; the end of {out / 'train.log'}:\n{''.join(log[-15:])}")
    return Run(time.monotonic() - started, stored, losses)


def plot_losses(runs: dict[str, Run], path: Path) -> None:
    """Training loss by update of every run."""
    figure, axes = new_figure(7, 4)
    for model, run in runs.items():
        axes.plot(*zip(*run.losses, strict=True), label=f"{NAMES[model]}, {run.stored:,} stored")
    axes.set_xlabel("update")
    axes.set_ylabel("training loss, bits a piece")
    axes.legend()
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def plot_columns(model: Path, dense: int, path: Path) -> None:
    """Which weight of a trained model reads which columns of its table."""
    from fairseq.checkpoint_utils import load_model_ensemble

    import paramshare.tasks  # noqa: F401  (registers the task that the checkpoint names)
    from paramshare import Sharing
    from paramshare.sharing import named_pools

    ((loaded,), _) = load_model_ensemble([str(model / "checkpoint_best.pt")])
    ((_, pool),) = named_pools(loaded)
    Sharing(loaded, pool, dense).plot(path)


def results_table(runs: dict[str, Run], scores: dict[str, score.Score], minutes: float) -> Table:
    table = Table(
        title=f"English to Vietnamese, {minutes:g} minutes of training each",
        caption="This shows the pipeline, not the quality: models this young translate badly.",
    )
    table.add_column("model", no_wrap=True)
    for name in ("stored parameters", "compression", "BLEU", "chrF", "words/s", "training s"):
        table.add_column(name, justify="right")
    dense = runs["baseline"].stored
    for model, run in runs.items():
        table.add_row(
            NAMES[model],
            f"{run.stored:,}",
            f"{dense / run.stored:.2f}x",
            f"{scores[model].bleu:.1f}",
            f"{scores[model].chrf:.1f}",
            f"{scores[model].words_per_second:.0f}",
            f"{run.seconds:.0f}",
        )
    return table


def translations(data: Path, scores: dict[str, score.Score], count: int = 10) -> str:
    """The first test sentences in steps, with reference and every model's translation."""
    sources, references = (
        score.read_lines(data / "raw" / f"test.{language}") for language in ("en", "vi")
    )
    lines = []
    for n in range(0, len(sources), max(1, len(sources) // count))[:count]:
        lines += [f"{'English':>14}  {sources[n]}", f"{'reference':>14}  {references[n]}"]
        lines += [f"{NAMES[m]:>14}  {s.hypotheses[n]}" for m, s in scores.items()]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5, help="training time of each model")
    parser.add_argument("--data", type=Path, help="folder with the IWSLT15 files; see prepare.py")
    parser.add_argument("--any-data", action="store_true", help="see prepare.py")
    parser.add_argument("--out", type=Path, default=ROOT / "demo", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: say how long to train, more than 0")
    console = Console()
    if not console.is_terminal:
        console.width = 100  # a log's; rich would wrap at 80

    data = args.out / "data" if args.data else prepare.DATA / "iwslt15_envi"
    command = [sys.executable, str(HERE / "prepare.py"), "--out", str(data)]
    if args.data:
        command += ["--data", str(args.data), *(["--any-data"] if args.any_data else [])]
    if (status := subprocess.run(command).returncode) != 0:
        return status

    runs, scores = {}, {}
    for model in MODELS:
        out = args.out / model
        console.print(f"training the {NAMES[model]} for {args.minutes:g} minutes")
        runs[model] = fit(model, data, out, args.minutes, args.seed, console)
        console.print(f"translating the test set with the {NAMES[model]}")
        scores[model] = score.score(out, data)
    plot_losses(runs, args.out / "loss.png")
    plot_columns(args.out / "veps", runs["baseline"].stored, args.out / "columns.png")
    text = translations(data, scores)
    (args.out / "translations.txt").write_text(text, "utf8")
    results = {
        model: {
            "stored_parameters": run.stored,
            "bleu": scores[model].bleu,
            "chrf": scores[model].chrf,
            "signatures": scores[model].signatures,
            "training_seconds": run.seconds,
            "updates": run.losses[-1][0] if run.losses else 0,
        }
        for model, run in runs.items()
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=1), "utf8")
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(results_table(runs, scores, args.minutes))
    console.print("  ".join(scores["veps"].signatures), highlight=False, soft_wrap=True)
    for name in ("columns.png", "loss.png", "translations.txt", "results.json"):
        console.print(f"{args.out / name}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
