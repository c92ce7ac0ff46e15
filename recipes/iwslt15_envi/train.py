"""Trains one model of the recipe: prints the whole fairseq-train command, then runs it.

    python recipes/iwslt15_envi/train.py veps --size base --updates 2000

Options that this script does not know go to fairseq-train as they are.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from paramshare.cli import user_dir

# Encoder and decoder layers, width, feed-forward width, heads. "paper" is the size at which
# IWSLT15 results are usually reported (fairseq's transformer_iwslt_de_en) and wants a GPU.
SIZES = {
    "demo": (3, 128, 512, 4),
    "small": (2, 128, 256, 4),
    "base": (3, 256, 512, 4),
    "paper": (6, 512, 1024, 4),
}
# --share and the peak learning rate of each model: the better of those tried, see README.md.
MODELS = {"baseline": ("none", 3e-3), "veps": ("veps", 5e-3), "eps": ("eps", 5e-3)}


def command(
    model: str,
    size: str,
    data: Path,
    out: Path,
    *,
    lr: float | None = None,
    warmup: int = 400,
    updates: int | None = None,
    minutes: float | None = None,
    tokens: int = 3000,
    seed: int = 1,
    extra: tuple[str, ...] = (),
) -> list[str]:
    """The fairseq-train command; `tokens` a batch, stopping after `updates` or `minutes`."""
    share, default_lr = MODELS[model]
    layers, width, feed_forward, heads = SIZES[size]
    args = [
        *(str(data), "--user-dir", str(user_dir())),
        *("--task", "shared_translation", "--source-lang", "en", "--target-lang", "vi"),
        *("--share", share, "--arch", "transformer_iwslt_de_en", "--share-all-embeddings"),
    ]
    for side in ("encoder", "decoder"):
        args += [
            *(f"--{side}-layers", str(layers), f"--{side}-embed-dim", str(width)),
            *(f"--{side}-ffn-embed-dim", str(feed_forward)),
            *(f"--{side}-attention-heads", str(heads)),
        ]
    args += [
        *("--dropout", "0.1", "--criterion", "label_smoothed_cross_entropy"),
        *("--label-smoothing", "0.1", "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)"),
        *("--clip-norm", "1.0", "--lr", str(lr or default_lr)),
        *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", str(warmup)),
        *("--max-tokens", str(tokens), "--seed", str(seed), "--save-dir", str(out)),
        *("--no-epoch-checkpoints", "--log-format", "simple", "--log-interval", "20"),
    ]
    if updates is not None:
        args += ["--max-update", str(updates)]
    if minutes is not None:
        args += ["--stop-time-hours", f"{minutes / 60:.5f}"]
    return [sys.executable, "-m", "fairseq_cli.train", *args, *extra]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--data", type=Path, default=Path("data/iwslt15_envi/bin"))
    parser.add_argument("--out", type=Path, help="default: data/iwslt15_envi/models/MODEL-SIZE")
    parser.add_argument("--lr", type=float, help="peak learning rate; default: the model's")
    parser.add_argument("--warmup", type=int, default=400, help="updates to the peak")
    parser.add_argument("--updates", type=int, help="stop after so many updates")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--tokens", type=int, default=3000, help="tokens a batch")
    parser.add_argument("--seed", type=int, default=1)
    args, extra = parser.parse_known_args()
    if not (args.data / "dict.en.txt").exists():
        parser.error(f"{args.data} holds no prepared data; run recipes/iwslt15_envi/prepare.py")
    if args.updates is None and args.minutes is None:
        parser.error("say when to stop: --updates or --minutes")
    out = args.out or args.data.parent / "models" / f"{args.model}-{args.size}"
    run = command(
        args.model,
        args.size,
        args.data,
        out,
        lr=args.lr,
        warmup=args.warmup,
        updates=args.updates,
        minutes=args.minutes,
        tokens=args.tokens,
        seed=args.seed,
        extra=tuple(extra),
    )
    print(shlex.join(run), flush=True)
    return subprocess.run(run).returncode


if __name__ == "__main__":
    sys.exit(main())
