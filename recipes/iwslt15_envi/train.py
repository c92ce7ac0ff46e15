"""Trains one model of the recipe: prints the whole fairseq-train command, then runs it.

    python recipes/iwslt15_envi/train.py transformer veps --size base --updates 2000

Options that this script does not know go to fairseq-train as they are. The same command continues a
run that was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from checkpoints import check_last
from records import read_record
from results import write_whole
from stages import STAMP, UserError

from paramshare.cli import user_dir


def _both(**options: object) -> dict[str, object]:
    """Options that encoder and decoder have in common."""
    return {
        f"{side}-{name.replace('_', '-')}": value
        for side in ("encoder", "decoder")
        for name, value in options.items()
    }


def _transformer(
    layers: int, width: int, feed_forward: int, dropout: float = 0.1, pre_norm: bool = False
) -> dict[str, object]:
    """One table for source, target and output."""
    sizes = _both(layers=layers, embed_dim=width, ffn_embed_dim=feed_forward, attention_heads=4)
    if pre_norm:
        sizes |= _both(normalize_before=True)
    return {
        "arch": "transformer_iwslt_de_en",
        "share-all-embeddings": True,
        **sizes,
        "dropout": dropout,
    }


def _lstm(layers: int, width: int, hidden: int, dropout: float = 0.1) -> dict[str, object]:
    """One table for source, target and output; half of the encoder reads backward."""
    sizes = _both(layers=layers, embed_dim=width)
    sizes |= {"encoder-bidirectional": True, "encoder-hidden-size": hidden // 2}
    sizes |= {"decoder-hidden-size": hidden, "decoder-out-embed-dim": width}
    sizes |= {"share-all-embeddings": True}
    return {"arch": "lstm_luong_wmt_en_de", **sizes, "dropout": dropout}


def _fconv(width: int, channels: int, dropout: float = 0.1) -> dict[str, object]:
    """fairseq's ConvS2S has two tables, one a side, whatever the dictionary; the output is tied to
    the decoder's. Its layers are fconv_iwslt_de_en's."""
    sizes = {**_both(embed_dim=width), "decoder-out-embed-dim": width}
    sizes |= {
        "encoder-layers": f"[({channels}, 3)] * 4",
        "decoder-layers": f"[({channels}, 3)] * 3",
    }
    return {
        "arch": "fconv_iwslt_de_en",
        "share-input-output-embed": True,
        **sizes,
        "dropout": dropout,
    }


# "compare" is what compare.py trains on two cores: small, and with the columns that EPS needs.
# "paper" is about what IWSLT15 results are reported with, and wants a GPU. "-wide" has a
# feed-forward four times as wide. These Transformers normalise before each block: plain and shared
# ones then leave the first plateau a hundred updates earlier, and with higher learning rates.
# sizes.py says what each size stores, and which of them EPS fits.
SIZES: dict[str, dict[str, dict[str, object]]] = {
    "transformer": {
        "demo": _transformer(3, 128, 512),
        "small": _transformer(2, 128, 256),
        "base": _transformer(3, 256, 512),
        "compare": _transformer(3, 128, 256, pre_norm=True),
        "compare-wide": _transformer(3, 128, 1024, pre_norm=True),
        "paper": _transformer(6, 512, 1024, dropout=0.3, pre_norm=True),
        "paper-wide": _transformer(6, 512, 4096, dropout=0.3, pre_norm=True),
    },
    "lstm": {"compare": _lstm(1, 128, 128), "paper": _lstm(2, 512, 512, dropout=0.3)},
    "fconv": {"compare": _fconv(128, 192), "paper": _fconv(256, 256, dropout=0.3)},
}
# --share of each model; "fairseq" is the baseline by fairseq's own task, without paramshare.
MODELS = {"baseline": "none", "veps": "veps", "eps": "eps", "fairseq": None}
# Peak learning rates of plain and of shared models: the better of those tried, see README.md.
RATES = {"transformer": (6e-3, 6e-3), "lstm": (1.2e-2, 1.2e-2), "fconv": (1.2e-2, 1.2e-2)}
POST_NORM = (3e-3, 5e-3)  # demo, small, base
PAPER = (1e-3, 1e-3)  # usual ones


def peak(arch: str, model: str, size: str) -> float:
    """The default learning rate."""
    plain, shared = RATES[arch]
    if size.startswith("paper"):
        plain, shared = PAPER
    elif size in ("demo", "small", "base"):
        plain, shared = POST_NORM
    return shared if MODELS[model] in ("veps", "eps") else plain


def plugin(model: str) -> list[str]:
    """The options that choose the task."""
    if MODELS[model] is None:
        return ["--task", "translation"]
    return ["--user-dir", str(user_dir()), "--task", "shared_translation"]


def environment(model: str, threads: int | None = None) -> dict[str, str]:
    """Of a fairseq command that takes so many threads; None: as many as there are cores."""
    own = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if MODELS[model] is None:
        # torch 2.6 and newer refuse fairseq's checkpoints where no plugin allows what they hold.
        own["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    return {**os.environ, **own}


def command(
    arch: str,
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
    share = MODELS[model]
    args = [str(data), *plugin(model), "--source-lang", "en", "--target-lang", "vi"]
    if share is not None:
        args += ["--share", share]
    for name, value in SIZES[arch][size].items():
        args += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    args += [
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)"),
        *("--clip-norm", "1.0", "--lr", str(lr or peak(arch, model, size))),
        *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", str(warmup)),
        # Else the sentences of a batch would depend on where the training was interrupted.
        *("--max-tokens", str(tokens), "--update-epoch-batch-itr", "True"),
        *("--seed", str(seed), "--save-dir", str(out), "--no-epoch-checkpoints"),
        *("--log-format", "simple", "--log-interval", "20"),
    ]
    if updates is not None:
        args += ["--max-update", str(updates)]
    if minutes is not None:
        args += ["--stop-time-hours", f"{minutes / 60:.5f}"]
    return [sys.executable, "-m", "fairseq_cli.train", *args, *extra]


def claim(out: Path, run: list[str], data: Path) -> str | None:
    """Makes `out` the folder of this training; None, or how it differs from the one that is there.

    fairseq would go on from any checkpoint that it finds. When to stop may differ. UserError where
    what is there is damaged.
    """
    options = [f" {option}" for option in shlex.join(run[3:]).split(" --")]
    stops = (" max-update ", " stop-time-hours ")
    stamp = data / STAMP
    settings = {
        "options": [option for option in options if not option.startswith(stops)],
        "data": stamp.read_text("utf-8") if stamp.exists() else None,
    }
    path = out / "settings.json"
    if (out / "checkpoint_last.pt").exists():
        if not path.exists():
            return f"no {path.name} says which"
        found = read_record(path, {"options": list[str], "data": str | None}, [*settings])
        if found["data"] != settings["data"]:
            return "other data"
        changed = {*found["options"]} ^ {*settings["options"]}
        if changed:
            return ", ".join(sorted(f"--{option.strip()}" for option in changed))
        check_last(out)
        return None
    out.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(settings, indent=1))
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch", choices=SIZES)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--size", default="compare", help="default: %(default)s; see README.md")
    parser.add_argument("--data", type=Path, default=Path("data/iwslt15_envi/bin"))
    parser.add_argument(
        "--out", type=Path, help="default: data/iwslt15_envi/models/ARCH-MODEL-SIZE"
    )
    parser.add_argument("--lr", type=float, help="peak learning rate; default: the model's")
    parser.add_argument("--warmup", type=int, default=400, help="updates to the peak")
    parser.add_argument("--updates", type=int, help="stop after so many updates")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--tokens", type=int, default=3000, help="tokens a batch")
    parser.add_argument("--seed", type=int, default=1)
    args, extra = parser.parse_known_args()
    if args.size not in SIZES[args.arch]:
        parser.error(f"{args.arch} has no size {args.size}; use {', '.join(SIZES[args.arch])}")
    if not (args.data / "dict.en.txt").exists():
        parser.error(f"{args.data} holds no prepared data; run recipes/iwslt15_envi/prepare.py")
    if args.updates is None and args.minutes is None:
        parser.error("say when to stop: --updates or --minutes")
    out = args.out or args.data.parent / "models" / f"{args.arch}-{args.model}-{args.size}"
    run = command(
        args.arch,
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
    try:
        other = claim(out, run, args.data)
    except UserError as error:
        parser.error(str(error))
    if other is not None:
        parser.error(
            f"{out} holds a training with other settings ({other}); give --out another one"
        )
    print(shlex.join(run), flush=True)
    return subprocess.run(run, env=environment(args.model)).returncode


if __name__ == "__main__":
    sys.exit(main())
