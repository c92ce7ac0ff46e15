"""Measures pretrained models: masked tokens, similarities and analogies of words, depth profiles.

    python recipes/bert_mlm/evaluate.py MODEL [MODEL ...]
    python recipes/bert_mlm/evaluate.py MODEL MODEL --only probe --probe TRAIN.jsonl TEST.jsonl

MODEL is a folder of pretrain.py, or another that AutoModelForMaskedLM loads. All models of one
tokenizer get the same masked blocks.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from pretrain import DATA
from script import check_installed, parser, run_script
from stages import UserError

NEEDED = {"numpy": "numpy", "torch": "torch", "transformers": "transformers"}
MEASURES = ("mlm", "words", "analogies", "probe")
SIMILARITIES = {"WordSim-353": "wordsim353.tsv", "SimLex-999": "simlex999.txt"}
QUESTIONS = "questions-words.txt"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    options.add_argument(
        "--data", type=Path, metavar="DIR", default=DATA, help="of prepare.py (%(default)s)"
    )
    options.add_argument(
        "--only",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="NAMES",
        help=f"of {','.join(MEASURES)}; default: all, probe with --probe",
    )
    options.add_argument(
        "--probe",
        nargs=2,
        type=Path,
        metavar=("TRAIN", "TEST"),
        help="edge probing data, JSON lines (see README.md)",
    )
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures of each MODEL here, too"
    )
    return options.parse_args(arguments)


def chosen(args: argparse.Namespace) -> list[str]:
    """The measures. UserError."""
    only = args.only or [name for name in MEASURES if name != "probe" or args.probe]
    for name in only:
        if name not in MEASURES:
            raise UserError(f"--only {name}: there is no such measure; {', '.join(MEASURES)}")
    if "probe" in only and not args.probe:
        raise UserError("--only probe needs the data: --probe TRAIN.jsonl TEST.jsonl")
    return only


def check_json(path: Path | None) -> None:
    """UserError if the figures cannot be written there: measuring takes its time."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"--json {path}: {reason}; give a file in a folder that is there")


def measure(
    folder: Path, only: Sequence[str], args: argparse.Namespace, texts: list[Any]
) -> dict[str, Any]:
    """The figures of one model; `texts` are those of the two files of --probe."""
    # Not at the top of the file, so that --help and check_installed need nothing installed.
    from folders import device, load_model, load_tokenizer, longest_input
    from measures import masked, probing, vectors
    from transformers import AutoModel

    model = load_model(AutoModel, folder).eval().to(device())
    tokenizer = load_tokenizer(folder)
    words = vectors.Words(model, tokenizer)
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if "mlm" in only:
        figures["mlm"] = masked.score(folder, tokenizer, args.data)
    if "words" in only:
        for name, file in SIMILARITIES.items():
            pairs = vectors.read_pairs(args.data / "words" / file)
            figures[name] = vectors.similarity(words, pairs)
    if "analogies" in only:
        questions = vectors.read_questions(args.data / "words" / QUESTIONS)
        figures["analogies"] = vectors.analogies(words, questions)
    if "probe" in only:
        profile = probing.profile(model, tokenizer, longest_input(model, tokenizer), *texts)
        figures["probe"] = asdict(profile)
    return figures


def rows(figures: dict[str, Any]) -> dict[str, str]:
    """The lines of one model's column."""
    shown = {"": Path(figures["model"]).name}
    shown["parameters of the encoder"] = f"{figures['parameters']:,}"
    if mlm := figures.get("mlm"):
        shown["masked tokens: loss"] = f"{mlm['loss']:.4f}"
        shown["masked tokens: accuracy, %"] = f"{mlm['accuracy']:.2f}"
        shown["masked tokens"] = f"{mlm['masked']:,}"
    for name in SIMILARITIES:
        if found := figures.get(name):
            shown[f"{name}: Spearman, table x 100"] = f"{found['table']:.1f}"
            shown[f"{name}: Spearman, alone x 100"] = f"{found['alone']:.1f}"
            shown[f"{name}: pairs of single pieces, %"] = f"{found['single']:.1f}"
    if found := figures.get("analogies"):
        right = found["accuracy"]
        shown["analogies: accuracy, %"] = "-" if right is None else f"{right:.2f}"
        shown["analogies: asked, %"] = f"{found['asked']:.1f}"
    if found := figures.get("probe"):
        for layer, values in enumerate(zip(found["accuracy"], found["macro_f1"], strict=True)):
            shown[f"probe of layer {layer}: accuracy, macro F1"] = "{:.2f} {:.2f}".format(*values)
        centre = found["centre"]
        shown["probe: centre of gravity"] = "-" if centre is None else f"{centre:.2f}"
        shown["probe: targets left out"] = f"{found['left_out']:,}"
    return shown


def show(columns: Sequence[dict[str, str]]) -> None:
    names = dict.fromkeys(name for column in columns for name in column)
    table = [[name, *(column.get(name, "") for column in columns)] for name in names]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for first, *others in table:
        cells = map(str.rjust, others, widths[1:])
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def evaluate(args: argparse.Namespace) -> None:
    from measures import probing

    only = chosen(args)
    check_json(args.json)
    texts: list[Any] = []
    if "probe" in only:
        texts = [probing.read(path) for path in args.probe]
        probing.check_labels(*texts, args.probe[1])
    figures = [
        {"model": str(folder), **measure(folder, only, args, texts)} for folder in args.models
    ]
    show([rows(found) for found in figures])
    if "probe" in only:
        first, *others = figures
        for other in others:
            profiles = (found["probe"]["accuracy"] for found in (first, other))
            found = probing.correlation(*profiles) / 100
            print(
                f"rank correlation of the profiles of {first['model']} and {other['model']}:"
                f" {found:+.3f}"
            )
    if args.json:
        by_model = {found["model"]: found for found in figures}
        args.json.write_text(json.dumps(by_model, indent=1) + "\n", "utf-8")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed(NEEDED)
        evaluate(args)

    return run_script("evaluate.py", body, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
