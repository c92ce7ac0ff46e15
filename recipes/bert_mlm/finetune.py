"""Finetunes a model on labelled texts: a GLUE task, or files of your own.

    python recipes/bert_mlm/finetune.py MODEL --out DIR \\
        --train data/bert_mlm/labelled/train.jsonl --dev data/bert_mlm/labelled/dev.jsonl
    python recipes/bert_mlm/finetune.py MODEL --out DIR --glue mrpc --glue-dir glue_data

MODEL is a folder that AutoModelForSequenceClassification loads. The new folder is one, too; its
results.json has the scores on the dev and the test texts after the last epoch. The defaults are the
paper's. An interrupted training goes on by the same command; torchrun and accelerate launch work.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from options import NEEDED, add_training
from script import check_installed, parser, run_script
from texts import examples


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("model", type=Path, metavar="MODEL", help="folder of a pretrained model")
    examples.add_options(options)
    add_training(options, epochs=5, lr=5e-5, batch=64, warmup=50)
    return options.parse_args(arguments)


def finetune(args: argparse.Namespace) -> None:
    # Not at the top of the file, so that --help and check_installed need nothing installed.
    import training
    from texts.classifying import Classifier, describe

    data = examples.load(args)
    training.say(data.describe())
    classifier = Classifier(args.model, data, args)
    made_from = {"model": training.digest(args.model), "data": training.digest_of(data.splits)}
    results = training.begin(args.out, training.settings_of(args, **made_from))
    training.say(describe(results or classifier.train()))


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed(NEEDED)
        finetune(args)

    return run_script("finetune.py", body)


if __name__ == "__main__":
    sys.exit(main())
