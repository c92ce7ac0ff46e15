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
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from script import check_installed, parser, run_script
from stages import UserError

from paramshare.cli import user_dir

DATA = Path(__file__).resolve().parents[2] / "data" / "coco_captioning"
BACKBONE = "efficientnet_lite0"

# In small the tables are wide and the layers narrow, so that EPS, too, has the columns it needs
# where there are few words.
SIZES: dict[str, dict[str, dict[str, object]]] = {
    "transformer": {
        "small": {
            **{"decoder-embed-dim": 256, "width": 96, "ffn-width": 192, "attention-heads": 4},
            **{"encoder-layers": 2, "decoder-layers": 3, "normalize-before": True},
        },
        "coco": {
            **{"decoder-embed-dim": 512, "width": 512, "ffn-width": 2048, "attention-heads": 8},
            **{"encoder-layers": 3, "decoder-layers": 6, "normalize-before": True},
        },
    },
    "lstm": {
        "small": {"decoder-embed-dim": 256, "hidden-size": 80, "decoder-layers": 2},
        "coco": {"decoder-embed-dim": 512, "hidden-size": 512, "decoder-layers": 2},
    },
    "fconv": {
        "small": {"decoder-embed-dim": 256, "channels": 96, "decoder-layers": 3},
        "coco": {"decoder-embed-dim": 512, "channels": 512, "decoder-layers": 6},
    },
}
# Batch (captions), epochs, warm-up, dropout; of the self-critical stage batch, epochs, rate.
SCHEDULES: dict[str, dict[str, object]] = {
    "small": {"batch": 32, "epochs": 40, "warmup": 100, "dropout": 0.3},
    "coco": {"batch": 256, "epochs": 20, "warmup": 4000, "dropout": 0.1},
}
SELF_CRITICAL: dict[str, dict[str, object]] = {
    "small": {"batch": 32, "epochs": 10, "lr": 1e-4},
    "coco": {"batch": 100, "epochs": 20, "lr": 1e-5},
}
MODELS = {"baseline": "none", "veps": "veps", "eps": "eps"}
# Peak learning rates: shared models like higher ones than their plain twins.
RATES = {"baseline": 1e-3, "veps": 2e-3, "eps": 2e-3}


def command(
    arch: str,
    model: str,
    *,
    size: str,
    data: Path,
    features: Path,
    out: Path,
    seed: int = 1,
    lr: float | None = None,
    epochs: int | None = None,
    extra: tuple[str, ...] = (),
) -> list[str]:
    """The fairseq-train command of the cross-entropy stage."""
    plan = SCHEDULES[size]
    rate = lr or RATES[model] / (1 if size == "small" else 2)
    return [
        *_common(arch, model, size, data, features, out, seed),
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"),
        *("--lr", str(rate), "--lr-scheduler", "inverse_sqrt"),
        *("--warmup-updates", str(plan["warmup"]), "--dropout", str(plan["dropout"])),
        *("--batch-size", str(plan["batch"]), "--max-epoch", str(epochs or plan["epochs"])),
        *extra,
    ]


def self_critical_command(
    arch: str,
    model: str,
    *,
    size: str,
    data: Path,
    features: Path,
    start: Path,
    out: Path,
    seed: int = 1,
    lr: float | None = None,
    epochs: int | None = None,
    extra: tuple[str, ...] = (),
) -> list[str]:
    """The one of the second stage, which starts from the best checkpoint in `start`."""
    plan = SELF_CRITICAL[size]
    run = [
        *_common(arch, model, size, data, features, out, seed),
        *("--criterion", "self_critical", "--lr", str(lr or plan["lr"]), "--dropout", "0"),
        *("--batch-size", str(plan["batch"]), "--max-epoch", str(epochs or plan["epochs"])),
        *extra,
    ]
    if not (out / "checkpoint_last.pt").exists():
        run += ["--finetune-from-model", str(start / "checkpoint_best.pt")]
    return run


def _common(
    arch: str, model: str, size: str, data: Path, features: Path, out: Path, seed: int
) -> list[str]:
    args = [
        *(sys.executable, "-m", "fairseq_cli.train", str(data), "--user-dir", str(user_dir())),
        *("--task", "shared_captioning", "--features", str(features)),
        *("--share", MODELS[model], "--arch", f"caption_{arch}"),
        "--share-decoder-input-output-embed",
    ]
    for name, value in SIZES[arch][size].items():
        args += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return [
        *args,
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0"),
        *("--seed", str(seed), "--save-dir", str(out), "--no-epoch-checkpoints"),
        *("--log-format", "simple", "--log-interval", "20", "--num-workers", "2"),
    ]


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    options = parser(__doc__)
    options.add_argument("arch", choices=SIZES)
    options.add_argument("model", choices=MODELS)
    options.add_argument("--size", choices=SCHEDULES, default="small")
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
    options.add_argument("--lr", type=float, metavar="N", help="default: the stage's and model's")
    options.add_argument("--epochs", type=int, metavar="N", help="default: the size's")
    options.add_argument("--seed", type=int, default=1, metavar="N")
    return options.parse_known_args(arguments)


def train(args: argparse.Namespace, extra: list[str]) -> None:
    captions, features = args.data / "captions", args.data / "features" / args.backbone
    for folder, script in ((captions, "prepare.py"), (features, "features.py")):
        if not folder.is_dir():
            raise UserError(f"{folder} is not there: run {script}")
    out = args.out or args.data / "models" / f"{args.arch}-{args.model}-{args.size}"
    common = {
        **{"size": args.size, "data": captions, "features": features, "seed": args.seed},
        **{"lr": args.lr, "epochs": args.epochs, "extra": tuple(extra)},
    }
    if args.self_critical:
        if not (out / "checkpoint_best.pt").is_file():
            raise UserError(f"{out} holds no checkpoint_best.pt: train it by cross-entropy first")
        second = out.with_name(f"{out.name}-self-critical")
        run = self_critical_command(args.arch, args.model, start=out, out=second, **common)
    else:
        run = command(args.arch, args.model, out=out, **common)
    print(shlex.join(run), flush=True)
    status = subprocess.run(run).returncode
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
