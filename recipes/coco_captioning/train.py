"""Trains one captioner: prints the whole fairseq-train command, then runs it.

    python recipes/coco_captioning/train.py transformer veps
    python recipes/coco_captioning/train.py lstm baseline --size coco --data DIR
    python recipes/coco_captioning/train.py transformer veps --self-critical

Two stages: cross-entropy; then --self-critical goes on from the best model of that, with CIDEr-D as
the reward. Options that this script does not know go to fairseq-train as they are. The same command
continues a run that was interrupted.
"""

from __future__ import annotations

import argparse
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from checkpoints import check_last, check_whole
from script import check_installed, parser, run_script
from stages import UserError

from paramshare.cli import user_dir

DATA = Path(__file__).resolve().parents[2] / "data" / "coco_captioning"
BACKBONE = "efficientnet_lite0"

# small has narrow tables and wide layers, which is where VEPS saves most; EPS has no columns for
# those. wide has them: wide tables, narrow layers.
SIZES: dict[str, dict[str, dict[str, object]]] = {
    "transformer": {
        "small": {
            **{"decoder-embed-dim": 128, "width": 128, "ffn-width": 256, "attention-heads": 4},
            **{"encoder-layers": 3, "decoder-layers": 6, "normalize-before": True},
        },
        "wide": {
            **{"decoder-embed-dim": 320, "width": 96, "ffn-width": 192, "attention-heads": 4},
            **{"encoder-layers": 3, "decoder-layers": 6, "normalize-before": True},
        },
        "coco": {
            **{"decoder-embed-dim": 512, "width": 512, "ffn-width": 2048, "attention-heads": 8},
            **{"encoder-layers": 3, "decoder-layers": 6, "normalize-before": True},
        },
    },
    "lstm": {
        "small": {"decoder-embed-dim": 128, "hidden-size": 128, "decoder-layers": 2},
        "wide": {"decoder-embed-dim": 320, "hidden-size": 64, "decoder-layers": 2},
        "coco": {"decoder-embed-dim": 512, "hidden-size": 512, "decoder-layers": 2},
    },
    "fconv": {
        "small": {"decoder-embed-dim": 128, "channels": 128, "decoder-layers": 6},
        "wide": {"decoder-embed-dim": 192, "channels": 96, "decoder-layers": 6},
        "coco": {"decoder-embed-dim": 512, "channels": 512, "decoder-layers": 6},
    },
}


class Schedule(NamedTuple):
    """Of a stage: captions in a batch, epochs, peak learning rate, warm-up in updates, dropout,
    epochs between validations."""

    batch: int
    epochs: int
    lr: float
    warmup: int
    dropout: float
    validate: int


CROSS_ENTROPY = {
    "small": Schedule(32, 60, 2e-3, 100, 0.3, 10),
    "wide": Schedule(32, 60, 2e-3, 100, 0.3, 10),
    "coco": Schedule(256, 20, 1e-3, 4000, 0.1, 1),
}
SELF_CRITICAL = {
    "small": Schedule(32, 10, 1e-4, 0, 0.0, 2),
    "wide": Schedule(32, 10, 1e-4, 0, 0.0, 2),
    "coco": Schedule(100, 20, 1e-5, 0, 0.0, 1),
}
MODELS = {"baseline": "none", "veps": "veps", "eps": "eps"}


class Run(NamedTuple):
    """One captioner to train: by cross-entropy, or from the best model of that in `start` on, by
    its own reward. lr, epochs: None: the schedule's. extra: options of fairseq-train."""

    arch: str
    model: str
    size: str
    captions: Path
    features: Path
    out: Path
    start: Path | None = None
    seed: int = 1
    lr: float | None = None
    epochs: int | None = None
    extra: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The fairseq-train command. It keeps the model with the best CIDEr of the validation
        pictures: while the loss of their one caption rises, captions still get better. The last
        epoch is always validated: fairseq does that only where the interval divides it."""
        plan = (CROSS_ENTROPY if self.start is None else SELF_CRITICAL)[self.size]
        epochs = self.epochs or plan.epochs
        args = [
            *(sys.executable, "-m", "fairseq_cli.train", str(self.captions)),
            *("--user-dir", str(user_dir()), "--task", "shared_captioning"),
            *("--features", str(self.features), "--share", MODELS[self.model]),
            *("--arch", f"caption_{self.arch}", "--share-decoder-input-output-embed"),
        ]
        for name, value in SIZES[self.arch][self.size].items():
            args += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        args += [
            *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0"),
            *("--lr", str(self.lr or plan.lr), "--dropout", str(plan.dropout)),
            *("--batch-size", str(plan.batch), "--max-epoch", str(epochs)),
            *("--seed", str(self.seed), "--save-dir", str(self.out), "--no-epoch-checkpoints"),
            *("--validate-interval", str(math.gcd(plan.validate, epochs)), "--eval-cider"),
            *("--best-checkpoint-metric", "cider", "--maximize-best-checkpoint-metric"),
            *("--log-format", "simple", "--log-interval", "20", "--num-workers", "2"),
        ]
        if self.start is None:
            args += ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"]
            args += ["--lr-scheduler", "inverse_sqrt", "--warmup-updates", str(plan.warmup)]
        else:
            args += ["--criterion", "self_critical"]
            if not (self.out / "checkpoint_last.pt").exists():
                args += ["--finetune-from-model", str(self.start / "checkpoint_best.pt")]
        return [*args, *self.extra]


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    options = parser(__doc__)
    options.add_argument("arch", choices=SIZES)
    options.add_argument("model", choices=MODELS)
    options.add_argument("--size", choices=CROSS_ENTROPY, default="small")
    options.add_argument(
        "--data", type=Path, default=DATA, metavar="DIR", help="of prepare.py (%(default)s)"
    )
    options.add_argument(
        "--backbone", default=BACKBONE, metavar="NAME", help="whose features (%(default)s)"
    )
    options.add_argument(
        "--out", type=Path, metavar="DIR", help="default: DATA/models/ARCH-MODEL-SIZE"
    )
    options.add_argument("--self-critical", action="store_true", help="the second stage")
    options.add_argument("--lr", type=float, metavar="N", help="default: the stage's")
    options.add_argument("--epochs", type=int, metavar="N", help="default: the size's")
    options.add_argument("--seed", type=int, default=1, metavar="N")
    return options.parse_known_args(arguments)


def train(args: argparse.Namespace, extra: list[str]) -> None:
    for name in ("lr", "epochs"):
        if (number := getattr(args, name)) is not None and number <= 0:
            raise UserError(f"--{name} {number} must be more than 0")
    captions, features = args.data / "captions", args.data / "features" / args.backbone
    for folder, script in ((captions, "prepare.py"), (features, "features.py")):
        if not folder.is_dir():
            raise UserError(f"{folder} is not there: run {script}")
    out = args.out or args.data / "models" / f"{args.arch}-{args.model}-{args.size}"
    out = out.resolve()  # . has no name
    start = None
    if args.self_critical:
        start, out = out, out.with_name(f"{out.name}-self-critical")
        if not (start / "checkpoint_best.pt").is_file():
            raise UserError(f"{start} holds no checkpoint_best.pt: train it by cross-entropy first")
        check_whole(start / "checkpoint_best.pt")
    check_last(out)
    where = {"captions": captions, "features": features, "out": out, "start": start}
    how = {"seed": args.seed, "lr": args.lr, "epochs": args.epochs, "extra": tuple(extra)}
    run = Run(args.arch, args.model, args.size, **where, **how)
    print(shlex.join(run.command()), flush=True)
    status = subprocess.run(run.command()).returncode
    if status:
        raise UserError(f"fairseq-train failed with status {status}, see above")


def main(arguments: list[str] | None = None) -> int:
    args, extra = parse(arguments)

    def body() -> None:
        check_installed({"fairseq_cli": "fairseq-fixed"})
        train(args, extra)

    return run_script("train.py", body)


if __name__ == "__main__":
    sys.exit(main())
