"""The options of all trainings by finetune.py and distill.py, and values that options can take.

Nothing is imported here that must be installed, so that --help always works.
"""

import argparse
from pathlib import Path

LENGTH = 128
PRECISIONS = ("bf16", "fp16", "fp32")
# The features of the table at which both students of sentences store about as much.
FEATURES = {"share": 128, "albert": 72}
NEEDED = {"numpy": "numpy", "torch": "torch", "transformers": "transformers"}
NEEDED |= {"accelerate": "accelerate"}


def add_training(
    parser: argparse.ArgumentParser, *, epochs: float, lr: float, batch: int, warmup: int
) -> None:
    """With these defaults."""
    group = parser.add_argument_group("training")
    group.add_argument("--out", type=Path, metavar="DIR", required=True, help="the new model")
    group.add_argument("--epochs", type=float, default=epochs, metavar="N", help=f"{epochs}")
    group.add_argument("--lr", type=float, default=lr, metavar="X", help=f"at its peak; {lr}")
    group.add_argument("--warmup", type=int, default=warmup, metavar="N", help=f"steps; {warmup}")
    group.add_argument(
        "--batch", type=int, default=batch, metavar="N", help=f"texts, on all devices; {batch}"
    )
    group.add_argument(
        "--length", type=int, metavar="N", help=f"longest input; {LENGTH}, or the model's longest"
    )
    group.add_argument("--seed", type=int, default=1, metavar="N", help="1")
    group.add_argument("--precision", choices=PRECISIONS, default="fp32", help="fp32")
    group.add_argument(
        "--save-every", type=int, default=500, metavar="N", help="steps between checkpoints; 500"
    )
