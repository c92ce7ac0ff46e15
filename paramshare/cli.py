"""The `paramshare` command."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import paramshare
from paramshare.errors import ShareError
from paramshare.report import count_parameters

# What a command needs beside the library itself.
_EXTRAS = {
    "import-sharebert": "transformers",
    "export-sharebert": "transformers",
    "caption": "captioning,fairseq",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="paramshare", description="Dense weights read from a model's own embedding table."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {paramshare.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "user-dir",
        help="print the folder of the fairseq plugins",
        description='For fairseq: fairseq-train DATA --user-dir "$(paramshare user-dir)" ...',
    )
    imported = commands.add_parser(
        "import-sharebert",
        help="convert a checkpoint of the released ShareBERT code",
        description="Makes a folder for transformers of a checkpoint folder of the released "
        "ShareBERT code: config.json, pytorch_model.bin, vocab.txt.",
    )
    imported.add_argument("folder", type=Path, metavar="DIR")
    imported.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    exported = commands.add_parser(
        "export-sharebert",
        help="convert a checkpoint of fairseq-train --arch sharebert",
        description="Makes a folder for transformers of a checkpoint of fairseq-train with "
        "--task shared_masked_lm and an --arch of ShareBERT.",
    )
    exported.add_argument("checkpoint", type=Path, metavar="CHECKPOINT.pt")
    exported.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    exported.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="copy the tokenizer of this folder, if it has the tokens of the checkpoint's dict.txt",
    )
    caption = commands.add_parser(
        "caption",
        help="describe pictures by a captioner of fairseq-train",
        description="Prints a caption for each picture, by a checkpoint of --task "
        "shared_captioning.",
    )
    caption.add_argument("pictures", type=Path, nargs="+", metavar="PICTURE")
    caption.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="of fairseq-train, or a checkpoint"
    )
    caption.add_argument("--beam", type=int, default=3, metavar="N", help="default: %(default)s")
    caption.add_argument(
        "--weights",
        metavar="FILE",
        help="of the network that made the features; default: those it is published with",
    )
    args = parser.parse_args(arguments)
    try:
        if args.command == "user-dir":
            print(user_dir())
        elif args.command == "import-sharebert":
            import_sharebert(args.folder, args.out)
        elif args.command == "caption":
            print_captions(args.pictures, args.model, args.beam, args.weights)
        else:
            export_sharebert(args.checkpoint, args.out, args.tokenizer)
    except (ShareError, ImportError) as error:
        text = str(error)
        if isinstance(error, ImportError) and "pip install" not in text:
            text += f": pip install 'paramshare[{_EXTRAS[args.command]}]'"
        print(f"paramshare {args.command}: {text}", file=sys.stderr)
        return 1
    return 0


def import_sharebert(folder: Path, out: Path) -> None:
    """Converts, and says what it made."""
    from paramshare.models import sharebert_released

    _report(sharebert_released.import_sharebert(folder, out), out)


def export_sharebert(checkpoint: Path, out: Path, tokenizer: Path | None) -> None:
    """Converts, and says what it made."""
    from paramshare.models import sharebert_fairseq

    _report(sharebert_fairseq.export_sharebert(checkpoint, out, tokenizer), out)


def print_captions(pictures: list[Path], model: Path, beam: int, weights: str | None) -> None:
    """Each picture's caption; with its name where there are several."""
    absent = [str(path) for path in pictures if not path.is_file()]
    if absent:
        raise ShareError(f"no such picture: {', '.join(absent)}")
    if beam < 1:
        raise ShareError(f"--beam {beam} must be at least 1")
    # fairseq warns of what is not used here, and turns on the logs of everybody.
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    from paramshare.tasks.caption import CaptionModel

    logging.getLogger().setLevel(logging.WARNING)
    for path, text in CaptionModel(model, weights).caption(pictures, beam=beam):
        print(f"{path}\t{text}" if len(pictures) > 1 else text, flush=True)


def _report(model: Any, out: Path) -> None:
    encoder = count_parameters(model.bert)
    print(
        f"{out}: {type(model).__name__}, {count_parameters(model):,} parameters, "
        f"{encoder:,} of them the encoder's"
    )


def user_dir() -> Path:
    """The folder for fairseq's `--user-dir`.

    fairseq imports it by its base name, with its parent first on `sys.path`; so the name is
    unique and the parent holds nothing else.
    """
    # Found, not imported, which takes seconds.
    spec = find_spec("paramshare.tasks")
    if spec is None or not spec.submodule_search_locations:
        raise ShareError("paramshare.tasks is not installed: pip install 'paramshare[fairseq]'")
    if find_spec("fairseq") is None:
        raise ShareError("fairseq is not installed: pip install 'paramshare[fairseq]'")
    return Path(spec.submodule_search_locations[0]) / "user_dir" / "paramshare_fairseq"


if __name__ == "__main__":
    raise SystemExit(main())
