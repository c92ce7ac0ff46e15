"""Prepares the English-Vietnamese data: text, SentencePiece pieces, fairseq's binary files.

    python recipes/iwslt15_envi/prepare.py                  # a corpus out of Debian's packages
    python recipes/iwslt15_envi/prepare.py --data DIR       # the IWSLT15 files, which you have

Four stages, each a folder of OUT: raw, spm, pieces, bin. A finished stage is not repeated, so a run
that was interrupted is continued by the same command.
"""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from script import Narrator, check_installed, parser, run_script
from stages import code_digest, only_one, run_stage, text_digest

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "data"
NEEDED = {"rich": "rich", "sentencepiece": "sentencepiece", "fairseq_cli": "fairseq-fixed"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with train, tst2012 and tst2013 . en and vi; MD5 sums are checked."
        " Without it, a corpus is built from Debian packages (about 85 MB to download)",
    )
    options.add_argument(
        "--any-data",
        action="store_true",
        help="take files of your own with those names: no MD5 check (needs --data)",
    )
    options.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=DATA / "iwslt15_envi",
        help="where everything is written (default: %(default)s)",
    )
    options.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        default=DATA / "debian",
        help="where downloaded packages are kept (default: %(default)s)",
    )
    options.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        default=4000,
        help="entries of the joint dictionary, with fairseq's 4 specials (default: %(default)s)",
    )
    args = options.parse_args(arguments)
    if args.any_data and args.data is None:
        options.error("--any-data says how to take --data DIR; give that too")
    return args


def prepare(args: argparse.Namespace) -> None:
    # Not at the top of the file, so that --help and the message above need nothing installed.
    import corpus
    import iwslt15
    import pieces
    import report

    narrator = Narrator("preparing")
    console, say = narrator.console, narrator.say
    out, cache = args.out.resolve(), args.cache.resolve()
    raw_code = code_digest(
        HERE,
        *("clean.py", "corpus.py", "debian_corpus.py", "extract.py", "iwslt15.py"),
        "../common/plain.py",
    )
    if args.data is None:
        raw_settings = {"corpus": "debian", "code": raw_code}
        fill_raw = partial(corpus.from_debian, cache=cache, say=say)
    else:
        sums = iwslt15.md5_sums(args.data)
        iwslt15.check(args.data, sums, args.any_data)
        raw_settings = {"corpus": "files", "md5": sums, "code": raw_code}
        fill_raw = partial(corpus.from_iwslt15, data=args.data)

    text, model, cut, binary = (out / name for name in ("raw", "spm", "pieces", "bin"))
    with only_one(out), narrator:
        raw = run_stage(
            text,
            raw_settings,
            fill_raw,
            say=say,
            doing="collecting the text",
            later=(model, cut, binary),
        )
        settings = {
            "text": text_digest(text),
            "vocab_size": args.vocab_size,
            "code": code_digest(HERE, "pieces.py"),
        }
        run_stage(
            model,
            settings,
            lambda folder: pieces.train_model(text, folder, args.vocab_size),
            say=say,
            doing="training the SentencePiece model",
            later=(cut, binary),
        )
        encoded = run_stage(
            cut,
            settings,
            lambda folder: pieces.encode(text, model, folder),
            say=say,
            doing="cutting the text into pieces",
            later=(binary,),
        )
        dictionary = run_stage(
            binary,
            settings,
            lambda folder: pieces.binarise(cut, folder, args.vocab_size),
            say=say,
            doing=shlex.join(pieces.preprocess_command(cut, binary)),
        )

    report.corpus_tables(console, raw)
    report.split_table(console, raw, encoded)
    for line in raw.get("missing", []):
        say(f"MISSING {line}")
    if raw.get("missing"):
        say(f"to try the missing ones again, delete {text} and run the same command")
    say(f"training pairs dropped for over {pieces.MAX_PIECES} pieces: {encoded['too_long']}")
    say(f"joint dictionary: {dictionary['entries']:,} entries, fairseq's specials included")
    report.places(console, out)


def main() -> int:
    args = parse()

    def body() -> None:
        check_installed(NEEDED)
        prepare(args)

    return run_script("prepare.py", body)


if __name__ == "__main__":
    sys.exit(main())
