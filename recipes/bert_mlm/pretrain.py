"""Pretrains a small BERT as a masked language model, on the blocks that prepare.py made.

    python recipes/bert_mlm/pretrain.py share --out data/bert_mlm/models/share
    python recipes/bert_mlm/pretrain.py base --data DIR --out DIR         # the paper's, on a GPU
    torchrun --nproc-per-node 8 recipes/bert_mlm/pretrain.py base --data DIR --out DIR

The papers' models (small, base, large, light-base, light-small, eps, eps-wide) are trained with
their settings, those of the comparison (README.md) with small ones. OUT appears when it is
finished: a folder that transformers loads. Until then checkpoints are in OUT.partial; a run that
was interrupted is continued by the same command.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from options import PRECISIONS
from script import check_installed, parser, run_script
from stages import UserError

DATA = Path(__file__).resolve().parents[2] / "data" / "bert_mlm"
NEEDED = {"transformers": "transformers", "accelerate": "accelerate"}


@dataclass
class Settings:
    """The paper's (README of the released code), of a batch that 16 steps of 250 make."""

    steps: int = 23_000
    batch: int = 4000
    micro_batch: int = 250
    lr: float = 1e-3
    warmup: float = 0.06  # share of the steps
    weight_decay: float = 0.01
    clip: float = 0.5


# Some minutes a model on two cores.
SMALL = Settings(steps=6000, batch=16, micro_batch=16)
HELP = {
    "steps": "updates",
    "batch": "blocks of an update, on all devices together",
    "micro_batch": "blocks that a device takes at once",
    "lr": "peak learning rate; it falls to zero linearly",
    "warmup": "share of the steps in which the learning rate rises",
    "weight_decay": "AdamW's, not of biases and norms",
    "clip": "largest norm of the gradient",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("model", metavar="MODEL", help="a name, see README.md")
    options.add_argument("--out", type=Path, required=True, metavar="DIR")
    options.add_argument(
        "--data", type=Path, metavar="DIR", default=DATA, help="of prepare.py (%(default)s)"
    )
    for field in fields(Settings):
        options.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            metavar="N",
            help=f"{HELP[field.name]} (the paper: {field.default}, the comparison: "
            f"{getattr(SMALL, field.name)})",
        )
    options.add_argument(
        "--table-gradient",
        type=float,
        metavar="N",
        help="ShareBERT: share of the weights' gradient that reaches the table",
    )
    options.add_argument("--whole-words", action="store_true", help="mask whole words")
    options.add_argument("--precision", choices=PRECISIONS, default="bf16")
    options.add_argument("--seed", type=int, default=1, metavar="N")
    options.add_argument(
        "--save-every", type=int, default=500, metavar="N", help="updates (default: %(default)s)"
    )
    return options.parse_args(arguments)


def settings_of(args: argparse.Namespace, small: bool) -> Settings:
    """Those of the model's kind, and what was said otherwise. UserError where that is nonsense."""
    default = SMALL if small else Settings()
    chosen = {
        f.name: getattr(default, f.name) if getattr(args, f.name) is None else getattr(args, f.name)
        for f in fields(Settings)
    }
    if not 0 <= chosen["warmup"] <= 1:
        raise UserError(f"--warmup {chosen['warmup']} is a share of the steps: use 0 to 1")
    if not chosen["weight_decay"] >= 0:
        raise UserError(f"--weight-decay {chosen['weight_decay']} must be at least 0")
    return Settings(**chosen)


def pretrain(args: argparse.Namespace) -> None:
    # Not at the top of the file, so that --help and check_installed need nothing installed.
    import lineup
    import torch
    import training
    from folders import load_tokenizer
    from masking import Blocks, Masks, data_digest, load_blocks
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments, set_seed

    from paramshare import ShareError

    training.check_positive(args, "steps", "batch", "micro_batch", "lr", "clip", "save_every")
    settings = settings_of(args, args.model in lineup.LINEUP)
    blocks = load_blocks(args.data / "blocks", "train")
    length = blocks[0].shape[1]
    tokenizer = load_tokenizer(args.data / "tokenizer")
    config = lineup.configuration(args.model, len(tokenizer), length)
    if args.table_gradient is not None:
        if config.sharing == "none":
            raise UserError(f"--table-gradient is not for {args.model}, which shares nothing")
        config.table_gradient = args.table_gradient
    set_seed(args.seed)
    try:
        model = AutoModelForMaskedLM.from_config(config)
    except ShareError as error:
        raise UserError(f"{args.model}: {error}") from None
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    accumulate, rest = divmod(settings.batch, settings.micro_batch * devices)
    if rest or not accumulate:
        raise UserError(
            f"--batch {settings.batch} is no multiple of --micro-batch {settings.micro_batch} "
            f"times {devices} devices"
        )
    masks = Masks(tokenizer, args.whole_words)
    examples = Blocks(blocks, masks, args.seed, settings.steps * settings.batch)
    made_from = {
        **training.settings_of(args, data=data_digest(args.data)),
        **vars(settings),
    }
    del made_from["micro_batch"]  # a smaller one must do where memory was too small
    if training.begin(args.out, made_from):
        training.say(f"{args.out} is there: finished before")
        return
    arguments = TrainingArguments(
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=accumulate,
        learning_rate=settings.lr,
        lr_scheduler_type="linear",
        warmup_steps=round(settings.warmup * settings.steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        logging_steps=max(1, min(100, settings.steps // 20)),
        dataloader_num_workers=4 if torch.cuda.is_available() else 0,
        **training.common(args),
    )
    if arguments.n_gpu > 1:
        raise UserError(
            f"there are {arguments.n_gpu} GPUs: start one process for each, by torchrun "
            f"--nproc-per-node {arguments.n_gpu}, or show one (CUDA_VISIBLE_DEVICES)"
        )

    class InOrder(Trainer):
        """The data set has the order of the run already."""

        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(examples)  # type: ignore[arg-type]

    trainer = InOrder(model, arguments, train_dataset=examples, processing_class=tokenizer)
    sharing = getattr(getattr(model, "bert", None), "sharing", None)
    training.say(str(sharing or f"{model.num_parameters():,} parameters, not shared"))
    seen = settings.steps * settings.batch * length
    training.say(f"{settings}\n{seen:,} tokens, of {sum(map(len, blocks)) * length:,}")
    training.train(trainer, args.out)
    results = {"parameters": model.num_parameters(), "log": trainer.state.log_history}
    training.finish(trainer, args.out, results)
    training.say(f"{args.out} is finished")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed(NEEDED)
        pretrain(args)

    return run_script("pretrain.py", body)


if __name__ == "__main__":
    sys.exit(main())
