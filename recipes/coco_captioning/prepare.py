"""Prepares pictures with captions for fairseq: COCO's annotation format, checked, and a vocabulary.

    python recipes/coco_captioning/prepare.py               # pictures out of a Debian package
    python recipes/coco_captioning/prepare.py --karpathy dataset_coco.json --images DIR
    python recipes/coco_captioning/prepare.py --annotations captions_train2017.json \\
        captions_val2017.json --images DIR

--karpathy has the usual split: 113,287 pictures to train on (train and restval), 5,000 and 5,000.
--annotations are the official files; COCO keeps the captions of its test pictures to itself, so the
validation pictures become valid and test, by a hash of their ids. Pictures lie in DIR, or in
DIR/train2014 and the like.

Two stages, each a folder of OUT: pictures (of the package), captions. A finished stage is not
repeated.
"""

import argparse
import hashlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
import quiet
from script import Narrator, check_installed, parser, run_script
from stages import UserError, code_digest, only_one, run_stage

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "data"
OUT = DATA / "coco_captioning"
NEEDED = {"rich": "rich", "PIL": "pillow", "fairseq": "fairseq-fixed"}
RULES = (
    *("../../tasks/caption_text.py", "../../tasks/captions.py", "../../models/colours.py"),
    "../common/plain.py",
)
CODE = ("captions", "coco", "split", "vocabulary")
NEXT = "python recipes/coco_captioning/features.py"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    source = options.add_mutually_exclusive_group()
    source.add_argument("--karpathy", type=Path, metavar="FILE", help="dataset_coco.json")
    source.add_argument(
        "--annotations", type=Path, nargs=2, metavar=("TRAIN", "VAL"), help="COCO's own files"
    )
    options.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="folder of the pictures of these files. Without them, captioned pictures out of a"
        " Debian package (161 MB to download)",
    )
    options.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=OUT,
        help="where everything is written (default: %(default)s)",
    )
    options.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        default=DATA / "debian",
        help="where downloaded packages are kept (default: %(default)s)",
    )
    tokens = options.add_mutually_exclusive_group()
    tokens.add_argument(
        "--min-count",
        type=int,
        metavar="N",
        help="words that occur less often in train are unknown (default: 5, of the package 1)",
    )
    tokens.add_argument(
        "--pieces", type=int, metavar="N", help="train SentencePiece: a vocabulary of N pieces"
    )
    options.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out pictures and captions that cannot be used, and say how many; without it"
        " they are an error",
    )
    args = options.parse_args(arguments)
    if (args.karpathy or args.annotations) and not args.images:
        options.error("--karpathy and --annotations need --images DIR, too")
    if args.images and not (args.karpathy or args.annotations):
        options.error("--images DIR needs --karpathy or --annotations, too")
    if args.pieces is None and args.min_count is None:
        args.min_count = 1 if args.images is None else 5
    return args


def check(args: argparse.Namespace) -> None:
    """What can be said before anything is made or imported."""
    for name in ("min_count", "pieces"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise UserError(f"--{name.replace('_', '-')} {number} must be at least 1")
    for path in _files(args):
        if not path.is_file():
            raise UserError(f"{path} is not there")
    if args.images and not args.images.is_dir():
        raise UserError(f"--images {args.images} is not a folder")


def prepare(args: argparse.Namespace) -> None:
    # Not at the top of the file, so that --help and check_installed need nothing installed.
    from corpus import captions, coco, split, stamps, summary

    from paramshare.tasks.caption_text import words
    from paramshare.tasks.captions import Captions, read_captions

    narrator = Narrator("preparing")
    say = narrator.say
    out, cache = args.out.resolve(), args.cache.resolve()
    pictures, target = out / "pictures", out / "captions"

    def read_stamps() -> tuple[list[Captions], coco.Sides]:
        found = read_captions(pictures / stamps.ANNOTATIONS, words)
        return [found], split.by_picture(found.files)

    with only_one(out), narrator, _reports(narrator):
        if args.images is None:
            with only_one(cache):
                package = run_stage(
                    pictures,
                    {"package": stamps.PACKAGE, "code": code_digest(HERE, "corpus/stamps.py")},
                    partial(stamps.fill, cache=cache, say=say),
                    say=say,
                    doing="pictures out of a package",
                    later=(target,),
                )
            read, files, folder = read_stamps, [pictures / stamps.ANNOTATIONS], pictures
        else:
            package, files, folder = {}, _files(args), args.images.resolve()
            read = partial(coco.karpathy if args.karpathy else coco.official, *files)
        figures = run_stage(
            target,
            {
                "files": [[path.name, _digest(path)] for path in files],
                "pictures": str(folder),
                "min_count": args.min_count,
                "pieces": args.pieces,
                "skip_bad": args.skip_bad,
                "code": code_digest(HERE, *(f"corpus/{name}.py" for name in CODE), *RULES),
            },
            lambda target: captions.fill(
                target, read, folder, args.min_count, args.pieces, args.skip_bad
            ),
            say=say,
            doing="checking pictures and captions",
        )

    for name, count in package.items():
        say(f"{stamps.PACKAGE}: {count:,} {name.replace('_', ' ')}")
    summary.show(narrator.console, figures, "words" if args.pieces is None else "pieces")
    say(f"next: {NEXT}" + (f" --data {args.out}" if args.out != OUT else ""))


def _files(args: argparse.Namespace) -> list[Path]:
    """The user's files of captions."""
    return [args.karpathy] if args.karpathy else list(args.annotations or ())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextmanager
def _reports(narrator: "Narrator") -> Iterator[None]:
    """What the task's rules log: how far they are, and what was left out."""
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        tell = narrator.say if record.levelno >= logging.WARNING else narrator.show
        tell(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("paramshare.tasks.captions")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def main() -> int:
    args = parse()

    def body() -> None:
        check_installed(NEEDED | ({"sentencepiece": "sentencepiece"} if args.pieces else {}))
        check(args)
        quiet.import_tasks()
        from paramshare import ShareError

        try:
            prepare(args)
        except ShareError as error:
            raise UserError(str(error)) from None

    return run_script("prepare.py", body)


if __name__ == "__main__":
    sys.exit(main())
