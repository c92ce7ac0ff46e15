"""What full-size COCO takes: the features file, parameters, memory, epochs an hour.

    python recipes/coco_captioning/scale.py
    python recipes/coco_captioning/scale.py --tflops 100 --pictures 113287 --words 10000

Builds the captioners of the size coco, runs one training step of each on made-up features, and
counts: operations as torch counts them (a step is three times its forward pass), and bytes of what
a step keeps for its backward pass. What a GPU makes of the operations is --tflops, sustained: take
a third of what its maker promises, or measure yours. Generating the shared weights, once a step, is
counted in the operations.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from building import build
from quiet import import_tasks
from results import markdown
from script import check_installed, parser, run_script
from stages import UserError
from train import CROSS_ENTROPY, MODELS, SIZES, Run

CELLS, WIDTH = 49, 1280  # of efficientnet_lite0
PER_PICTURE, TOKENS = 5, 12  # captions; tokens of one with its end, by what COCO's are on average
COUNTED = 8  # captions in the step that is counted


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--pictures", type=int, default=113_287, metavar="N", help="%(default)s")
    options.add_argument("--words", type=int, default=10_000, metavar="N", help="%(default)s")
    options.add_argument(
        "--tflops", type=float, default=30.0, metavar="N", help="sustained (%(default)s)"
    )
    options.add_argument("--archs", nargs="+", choices=SIZES, default=list(SIZES))
    return options.parse_args(arguments)


def scale(args: argparse.Namespace) -> None:
    for name in ("pictures", "words", "tflops"):
        if getattr(args, name) <= 0:
            raise UserError(f"--{name} {getattr(args, name)} must be more than 0")
    size = args.pictures * CELLS * WIDTH * 2
    captions = args.pictures * PER_PICTURE
    batch = CROSS_ENTROPY["coco"].batch
    print(
        f"features of {args.pictures:,} pictures: {size / 1e9:.1f} GB in float16, read from disk "
        f"where they do not fit into memory; an epoch is {captions:,} captions, "
        f"{captions // batch:,} updates, and reads {captions * CELLS * WIDTH * 2 / 1e9:.0f} GB"
    )
    head = ["captioner", "stored", "GFLOPs a caption, training", f"GB at a batch of {batch}"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder), args.words)
        for arch in args.archs:
            for name in MODELS:
                rows.append([f"{arch} {name}", *count(arch, name, data, batch, captions, args)])
    print(markdown([*head, "epochs an hour"], rows))


def make_data(folder: Path, words: int) -> Path:
    """A vocabulary of so many words, and the description of features that are not there."""
    import numpy as np

    from paramshare.tasks.features import write_features

    (folder / "dict.txt").write_text("".join(f"w{n} 1\n" for n in range(words)), "utf-8")
    write_features(
        folder / "features" / "train",
        [1],
        lambda ids: [np.zeros((CELLS, WIDTH), np.float16) for _ in ids],
        width=WIDTH,
        grid=(7, 7),
        backbone=None,
        batch=1,
    )
    return folder


def count(
    arch: str, name: str, data: Path, batch: int, captions: int, args: argparse.Namespace
) -> list[str]:
    """Stored parameters, GFLOPs, GB, epochs an hour; or why the model cannot be."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from paramshare import ShareError
    from paramshare.report import count_parameters

    try:
        run = Run(arch, name, "coco", data, data / "features", data)
        _, model = build(run.command()[3:])
    except ShareError as error:
        return [str(error).partition(": ")[2].partition(";")[0], "", "", ""]
    stored = count_parameters(model)
    inputs = {
        "src_tokens": torch.randn(COUNTED, CELLS, WIDTH),
        "src_lengths": torch.full((COUNTED,), CELLS),
        "prev_output_tokens": torch.randint(4, args.words, (COUNTED, TOKENS)),
    }

    def step(captions: int) -> tuple[float, int]:
        """Operations of the forward pass; bytes it keeps."""
        kept: dict[int, int] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        counter = FlopCounterMode(display=False)
        some = {key: x[:captions] for key, x in inputs.items()}
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        with hooks, counter, sdpa_kernel(SDPBackend.MATH):
            model.train()(**some)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return counter.get_total_flops(), sum(n for at, n in kept.items() if at not in own)

    # What grows with the batch, and what does not: two sizes tell.
    (few, few_bytes), (many, many_bytes) = step(COUNTED // 2), step(COUNTED)
    each, each_bytes = ((a - b) / (COUNTED // 2) for a, b in ((many, few), (many_bytes, few_bytes)))
    fixed, fixed_bytes = few - each * COUNTED // 2, few_bytes - each_bytes * COUNTED // 2
    training = 3 * (each + fixed / batch)
    memory = 16 * stored + each_bytes * batch + fixed_bytes  # weights, gradients, Adam's two
    hour = 3600 * args.tflops * 1e12 / (training * captions)
    return [f"{stored:,}", f"{training / 1e9:.2f}", f"{memory / 1e9:.1f}", f"{hour:.1f}"]


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed({"fairseq": "fairseq-fixed"})
        import_tasks()
        scale(args)

    return run_script("scale.py", body, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
