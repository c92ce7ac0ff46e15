"""Makes features of the pictures that prepare.py checked: what a network sees, once for all.

    python recipes/coco_captioning/features.py
    python recipes/coco_captioning/features.py --backbone resnet101 --weights resnet101.pth

OUT/features/BACKBONE gets a folder for each split, in float16: of a picture, the last feature map
of efficientnet_lite0, 7 x 7 cells of 1,280 numbers, takes 125 kB. On a GPU if there is one. A run
that was interrupted is continued by the same command.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import quiet
from script import check_installed, parser, run_script
from stages import UserError, only_one

DATA = Path(__file__).resolve().parents[2] / "data" / "coco_captioning"
NEEDED = {"rich": "rich", "PIL": "pillow", "torchvision": "torchvision", "fairseq": "fairseq-fixed"}
SPLITS = ("train", "valid", "test")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--data", type=Path, metavar="DIR", default=DATA, help="of prepare.py (%(default)s)"
    )
    options.add_argument(
        "--backbone",
        metavar="NAME",
        default="efficientnet_lite0",
        help="it, or one of torchvision's classifiers (default: %(default)s)",
    )
    options.add_argument(
        "--weights",
        metavar="PATH",
        help="file of its weights (default: those it is published with; torchvision downloads"
        " them)",
    )
    options.add_argument(
        "--batch", type=int, metavar="N", default=32, help="pictures at once (default: %(default)s)"
    )
    return options.parse_args(arguments)


def check(args: argparse.Namespace) -> None:
    """What can be said before anything is imported."""
    if args.batch < 1:
        raise UserError(f"--batch {args.batch} must be at least 1")
    if not (captions := args.data / "captions").is_dir():
        raise UserError(f"{captions} is not there: run prepare.py")


def make(args: argparse.Namespace) -> None:
    # Not at the top of the file, so that --help and check_installed need nothing installed.
    import torch
    from loader import Loader
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    from paramshare.models.backbones import make_backbone
    from paramshare.tasks.caption_text import words
    from paramshare.tasks.captions import read_captions
    from paramshare.tasks.features import ROWS, write_features

    captions = args.data / "captions"
    splits = {split: read_captions(captions / f"{split}.json", words) for split in SPLITS}
    backbone = make_backbone(args.backbone, args.weights)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backbone.to(device)
    out = args.data / "features" / args.backbone
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining()
    with only_one(out), Progress(*columns) as progress:
        for split, found in splits.items():
            folder, ids = out / split, list(found.files)
            if _is_made(folder, ids, backbone.identity):
                progress.console.print(f"{split}: finished before")
                continue
            bar = progress.add_task(split, total=len(ids))
            started = time.monotonic()
            with (
                Loader(found, backbone.transform, args.batch) as load,
                torch.inference_mode(),
            ):
                before = write_features(
                    folder,
                    ids,
                    lambda part, load=load: backbone(load(part).to(device)).cpu().numpy(),
                    width=backbone.width,
                    grid=backbone.grid,
                    backbone=backbone.identity,
                    batch=args.batch,
                    progress=lambda done, bar=bar: progress.update(bar, completed=done),
                )
            rate = (len(ids) - before) / (time.monotonic() - started)
            size = (folder / ROWS).stat().st_size / 1e6
            progress.console.print(
                f"{split}: {len(ids):,} pictures, {size:,.0f} MB, {rate:,.0f} pictures a second"
                + (f"; {before:,} were made before" if before else "")
            )
    print(f"{out}: {backbone.grid[0]} x {backbone.grid[1]} cells of {backbone.width:,} numbers")


def _is_made(folder: Path, ids: list[int], identity: object) -> bool:
    """Whether it is whole, and of these pictures and this network."""
    from paramshare import ShareError
    from paramshare.tasks.features import Features

    try:
        made = Features(folder)
    except ShareError:
        return False
    return (made.ids, made.backbone) == (ids, identity)


def main() -> int:
    args = parse()

    def body() -> None:
        check_installed(NEEDED)
        check(args)
        quiet.import_tasks()
        from paramshare import ShareError

        try:
            make(args)
        except ShareError as error:
            raise UserError(str(error)) from None

    return run_script("features.py", body)


if __name__ == "__main__":
    sys.exit(main())
