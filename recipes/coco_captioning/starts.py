"""How shared captioners begin: spread of activations before training, and the first losses.

    python recipes/coco_captioning/starts.py

The authors saw EPS start badly in captioning where VEPS does not. Of each architecture, in the size
that EPS fits (wide), this prints the standard deviation of what the first and the last layer of the
decoder put out, and of the logits, for one batch before the first update, and the training loss of
the first epochs: with weights that start with the spread of the plain model's (--share-init match,
the default), shared by all depths or by none; and with a projection of N(0, 0.02) (paper).
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from building import build
from quiet import import_tasks
from results import markdown
from script import check_installed, parser, run_script
from stages import UserError
from train import BACKBONE, DATA, SIZES, Run

STARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("baseline", "", ()),
    ("veps", "match", ("--share-init", "match")),
    ("veps", "match, own layers", ("--share-init", "match", "--share-depth", "none")),
    ("veps", "paper", ("--share-init", "paper")),
    ("eps", "match", ("--share-init", "match")),
    ("eps", "paper", ("--share-init", "paper")),
)
PAIRS = 32


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--data", type=Path, default=DATA, metavar="DIR", help="of prepare.py (%(default)s)"
    )
    options.add_argument("--archs", nargs="+", choices=SIZES, default=list(SIZES))
    options.add_argument(
        "--epochs", type=int, default=5, metavar="N", help="to train (default: %(default)s)"
    )
    return options.parse_args(arguments)


def starts(args: argparse.Namespace) -> None:
    if args.epochs < 1:
        raise UserError(f"--epochs {args.epochs} must be at least 1")
    if not (args.data / "features" / BACKBONE).is_dir():
        raise UserError(f"{args.data} holds no features of {BACKBONE}: run features.py")
    head = ["captioner", "start", "first layer", "last layer", "logits", "loss before"]
    rows = []
    for arch in args.archs:
        for model, start, extra in STARTS:
            with tempfile.TemporaryDirectory() as out:
                where = args.data / "captions", args.data / "features" / BACKBONE, Path(out)
                run = Run(arch, model, "wide", *where, epochs=args.epochs, extra=extra)
                spreads = before(run)
                losses = train(run)
            cells = [f"{x:.2f}" for x in (*spreads, *losses)]
            rows.append([f"{arch} {model}", start, *cells])
            print(*rows[-1], flush=True)
    print(markdown([*head, *(f"epoch {n}" for n in range(1, args.epochs + 1))], rows))


def before(run: Run) -> tuple[float, ...]:
    """Standard deviations of first layer, last layer and logits; loss in bits a token."""
    import torch

    task, model = build(run.command()[3:])
    model.eval()
    task.load_dataset("train")
    data = task.dataset("train")
    batch = data.collater([data[n] for n in range(PAIRS)])
    decoder = model.decoder
    layers = decoder.convolutions if hasattr(decoder, "convolutions") else decoder.layers
    made: dict[Any, list[torch.Tensor]] = {layers[0]: [], layers[-1]: []}

    def keep(layer: Any, inputs: Any, output: Any) -> None:
        made[layer].append(output[0] if isinstance(output, tuple) else output)

    for layer in made:
        layer.register_forward_hook(keep)
    with torch.no_grad():
        logits, _ = model(**batch["net_input"])
        there = batch["target"].ne(task.dictionary.pad())
        loss = torch.nn.functional.cross_entropy(logits[there], batch["target"][there])
    spreads = [torch.cat([x.flatten() for x in outputs]).std() for outputs in made.values()]
    return (*map(float, spreads), float(logits[there].std()), float(loss) / math.log(2))


def train(run: Run) -> list[float]:
    """Losses of the epochs, in bits a token."""
    done = subprocess.run([*run.command(), "--no-save"], capture_output=True, text=True)
    losses = re.findall(r"\| train \| epoch \d+ .*?\| nll_loss ([\d.]+)", done.stdout + done.stderr)
    if done.returncode or not losses:
        raise UserError(f"fairseq-train failed:\n{done.stderr[-3000:]}")
    return [float(loss) for loss in losses]


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed({"fairseq": "fairseq-fixed"})
        import_tasks()
        starts(args)

    return run_script("starts.py", body, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
