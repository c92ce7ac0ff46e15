"""Captions a split, or any pictures, by a trained model.

    python recipes/coco_captioning/caption.py data/coco_captioning/models/lstm-veps-small
    python recipes/coco_captioning/caption.py MODEL --pictures holiday/ dog.jpg

Of a split the features that are there are read (where the model was trained on pictures, those),
and MODEL/test.json gets COCO's results, which score.py and gallery.py take. Of other pictures,
captions are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from quiet import import_tasks
from script import check_installed, parser, run_script
from stages import UserError, write_lines
from train import BACKBONE, DATA

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("model", type=Path, metavar="MODEL", help="a folder that train.py wrote")
    options.add_argument(
        "--data", type=Path, default=DATA, metavar="DIR", help="of prepare.py (%(default)s)"
    )
    options.add_argument(
        "--backbone", default=BACKBONE, metavar="NAME", help="whose features (%(default)s)"
    )
    options.add_argument("--split", default="test", help="train, valid or test (%(default)s)")
    options.add_argument(
        "--pictures", type=Path, nargs="+", metavar="PATH", help="files and folders instead"
    )
    options.add_argument(
        "--weights", metavar="FILE", help="of the backbone, where it was given to features.py"
    )
    options.add_argument("--out", type=Path, metavar="FILE", help="default: MODEL/SPLIT.json")
    options.add_argument("--beam", type=int, default=3, metavar="N", help="%(default)s")
    options.add_argument("--batch", type=int, default=16, metavar="N", help="%(default)s")
    options.add_argument(
        "--lenpen", type=float, default=1.0, metavar="N", help="> 1: longer captions (%(default)s)"
    )
    options.add_argument(
        "--no-repeat-ngram-size", type=int, default=3, metavar="N", help="0: any (%(default)s)"
    )
    return options.parse_args(arguments)


def caption(args: argparse.Namespace) -> None:
    for name in ("beam", "batch"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)} must be at least 1")
    pictures = found(args.pictures) if args.pictures else []
    import_tasks()
    from paramshare import ShareError
    from paramshare.tasks.caption import CaptionModel

    generation = {
        **{"beam": args.beam, "lenpen": args.lenpen},
        **{"no_repeat_ngram_size": args.no_repeat_ngram_size},
    }
    try:
        model = CaptionModel(args.model, args.weights)
        if pictures:
            for path, text in model.caption(pictures, args.batch, **generation):
                print(f"{path}\t{text}", flush=True)
            return
        out = args.out or args.model / f"{args.split}.json"
        if out.is_dir() or not out.parent.is_dir():  # said now, not when all is captioned
            raise UserError(f"{out}: give --out, a file in a folder that is there")
        results, seconds = of_split(model, args, generation)
    except ShareError as error:
        raise UserError(f"{error}") from None
    temporary = out.with_name(f".{out.name}")
    write_lines(temporary, [json.dumps(results, indent=1, ensure_ascii=False)])
    temporary.replace(out)
    print(f"{out}: {len(results):,} captions, {len(results) / seconds:.1f} a second")


def of_split(
    model: Any, args: argparse.Namespace, generation: dict[str, Any]
) -> tuple[list[dict[str, Any]], float]:
    """COCO's results for all pictures of the split, and the seconds that they took."""
    from paramshare.tasks.captions import read_captions
    from paramshare.tasks.features import Features
    from paramshare.tasks.pictures import FeatureSources, PictureSources

    captions = read_captions(args.data / "captions" / f"{args.split}.json", model.task.text.split)
    captions.settle(skip=False)
    pictures = list(captions.files)
    backbone = model.model.encoder.backbone
    sources: Any
    if backbone is None:
        features = Features(args.data / "features" / args.backbone / args.split)
        model.task.check_made_by(features.backbone, features.folder)
        sources = FeatureSources(features)
    elif captions.folder is None:
        raise UserError(f"{captions.path} does not say where its pictures are: use --pictures")
    else:
        sources = PictureSources(captions.folder, captions.files, backbone.transform)
    results, started = [], time.monotonic()
    for start in range(0, len(pictures), args.batch):
        part = pictures[start : start + args.batch]
        texts = model.generate([sources.load(picture) for picture in part], **generation)
        results += [
            {"image_id": picture, "caption": text}
            for picture, text in zip(part, texts, strict=True)
        ]
    return results, time.monotonic() - started


def found(paths: list[Path]) -> list[Path]:
    """Files, and of folders the pictures in them. UserError where there are none."""
    pictures = []
    for path in paths:
        if path.is_dir():
            inside = sorted(x for x in path.iterdir() if x.suffix.lower() in SUFFIXES)
            if not inside:
                raise UserError(f"{path} holds no picture ({', '.join(SUFFIXES)})")
            pictures += inside
        elif path.is_file():
            pictures.append(path)
        else:
            raise UserError(f"{path} is not there")
    return pictures


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed({"fairseq": "fairseq-fixed", "PIL": "pillow"})
        caption(args)

    return run_script("caption.py", body, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
