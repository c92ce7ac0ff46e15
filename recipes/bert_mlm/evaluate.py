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
import probing
import torch
import vectors
from folders import device, load_model, load_tokenizer, longest_input
from masking import IGNORED, Blocks, Masks, load_blocks
from pretrain import DATA
from script import run_script
from stages import UserError
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerBase

MEASURES = ("mlm", "words", "analogies", "probe")
SIMILARITIES = {"WordSim-353": "wordsim353.tsv", "SimLex-999": "simlex999.txt"}
QUESTIONS = "questions-words.txt"
MASK_SEED = 1
BATCH = 32


def parse(arguments: list[str] | None) -> argparse.Namespace:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", default=DATA, help="of prepare.py (%(default)s)"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help=f"of {','.join(MEASURES)}; default: all, probe with --probe",
    )
    parser.add_argument(
        "--probe",
        nargs=2,
        type=Path,
        metavar=("TRAIN", "TEST"),
        help="edge probing data, JSON lines (see README.md); of each file the first"
        f" {probing.MOST_TARGETS:,} targets",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures of each MODEL here, too"
    )
    return parser.parse_args(arguments)


def chosen(args: argparse.Namespace) -> list[str]:
    """The measures. UserError."""
    only = args.only or [name for name in MEASURES if name != "probe" or args.probe]
    for name in only:
        if name not in MEASURES:
            raise UserError(f"--only {name}: there is no such measure; {', '.join(MEASURES)}")
    if "probe" in only and not args.probe:
        raise UserError("--only probe needs the data: --probe TRAIN.jsonl TEST.jsonl")
    return only


def measure_mlm(folder: Path, tokenizer: PreTrainedTokenizerBase, data: Path) -> dict[str, float]:
    """Cross-entropy (nats) and accuracy (%) at the masked tokens of the dev blocks."""
    model, info = load_model(AutoModelForMaskedLM, folder, output_loading_info=True)
    if info["missing_keys"]:
        raise UserError(
            f"{folder} has no output layer for masked tokens; --only takes other measures"
        )
    if load_tokenizer(data / "tokenizer").get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{folder} has another tokenizer than the blocks of {data}")
    blocks = load_blocks(data / "blocks", "dev")
    if blocks[0].shape[1] > model.config.max_position_embeddings:
        raise UserError(f"{folder} takes no blocks of {blocks[0].shape[1]} tokens")
    examples = Blocks(blocks, Masks(tokenizer), MASK_SEED)
    model.eval().to(device())
    loss, right, count = 0.0, 0, 0
    for batch in torch.utils.data.DataLoader(examples, BATCH):
        labels = batch["labels"].to(device())
        masked = labels != IGNORED
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"].to(device())).logits[masked].float()
        loss += F.cross_entropy(logits, labels[masked], reduction="sum").item()
        right += int((logits.argmax(-1) == labels[masked]).sum())
        count += int(masked.sum())
    return {"loss": loss / count, "accuracy": 100 * right / count, "masked": count}


def measure(
    folder: Path, only: Sequence[str], args: argparse.Namespace, texts: list[list[probing.Text]]
) -> dict[str, Any]:
    model = load_model(AutoModel, folder).eval().to(device())
    tokenizer = load_tokenizer(folder)
    words = vectors.Words(model, tokenizer)
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if "mlm" in only:
        figures["mlm"] = measure_mlm(folder, tokenizer, args.data)
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
        shown["analogies: accuracy, %"] = f"{found['accuracy']:.2f}"
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
    only = chosen(args)
    texts: list[list[probing.Text]] = []
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
    return run_script("evaluate.py", lambda: evaluate(args))


if __name__ == "__main__":
    sys.exit(main())
