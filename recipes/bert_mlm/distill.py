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
import distil_labels
import distil_sentences
from pretrain import DATA
from script import run_script


def parse(arguments: list[str] | None) -> argparse.Namespace:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, text in (
        ("classify", distil_labels, "logits of labelled texts"),
        ("sentences", distil_sentences, "vectors of sentences"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        module.add_options(command)
        command.add_argument(
            "--cache",
            type=Path,
            metavar="DIR",
            default=DATA / "teacher",
            help="where the teacher's outputs are kept (default: %(default)s)",
        )
        command.set_defaults(distil=module.distil)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return run_script("distill.py", lambda: args.distil(args))


if __name__ == "__main__":
    sys.exit(main())
