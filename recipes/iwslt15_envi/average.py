"""Averages the parameters of several checkpoints of one training, which often translates better.

    python recipes/iwslt15_envi/train.py transformer veps --updates 2000 \\
        --save-interval-updates 100 --keep-interval-updates 5 --out DIR
    python recipes/iwslt15_envi/average.py DIR/checkpoint_*_*.pt

Writes checkpoint_average.pt beside the first one, which fairseq reads like any other and score.py
scores when it is given its path. What a shared model stores is averaged: its weights are then those
of the average table, not averages of weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from quiet import import_tasks
from script import check_installed, parser, run_script
from stages import UserError

NAME = "checkpoint_average.pt"


def average(paths: list[Path]) -> dict[str, Any]:
    """The last checkpoint with the mean of all for its model, and no state of the optimizer.
    Sums are in float64; one checkpoint is in memory at a time. Raises UserError where they are not
    of one model."""
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu

    from paramshare import ShareError

    sums: dict[str, Any] = {}
    for path in paths:
        if not path.is_file():
            raise UserError(f"there is no {path}")
        try:
            state = load_checkpoint_to_cpu(str(path))
        except ShareError as error:
            raise UserError(f"{error}") from None
        model = state["model"]
        if sums and _shapes(sums) != _shapes(model):
            raise UserError(f"{path} is of another model than {paths[0]}: other names or shapes")
        for name, tensor in model.items():
            if tensor.is_floating_point():
                sums[name] = sums.get(name, 0) + tensor.double()
            elif not sums.setdefault(name, tensor).equal(tensor):
                # What is no parameter is a fact about the model, such as its sharing plan.
                raise UserError(f"{path} is of another model than {paths[0]}: {name} differs")
    for name, tensor in model.items():
        if tensor.is_floating_point():
            model[name] = (sums[name] / len(paths)).to(tensor.dtype)
    state.pop("last_optimizer_state", None)
    return state


def _shapes(model: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in model.items()}


def write(paths: list[Path], out: Path) -> None:
    from fairseq.checkpoint_utils import torch_persistent_save

    if len(paths) < 2:
        raise UserError("give at least two checkpoints")
    import_tasks()
    state = average(paths)
    temporary = out.with_name(f"{out.name}.part")
    torch_persistent_save(state, str(temporary))
    temporary.replace(out)
    print(f"{out}: the average of {len(paths)} checkpoints")


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("checkpoints", nargs="+", type=Path)
    options.add_argument("--out", type=Path, metavar="FILE", help=f"default: {NAME} beside them")
    args = options.parse_args(arguments)

    def body() -> None:
        check_installed({"fairseq": "fairseq-fixed"})
        write(args.checkpoints, args.out or args.checkpoints[0].with_name(NAME))

    return run_script("average.py", body, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
