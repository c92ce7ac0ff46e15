"""What 8 bits do to finetuned classifiers: size, accuracy, and change of the logits.

    python recipes/bert_mlm/int8.py MODEL [MODEL ...] \\
        --train data/bert_mlm/labelled/train.jsonl --dev data/bert_mlm/labelled/dev.jsonl \\
        --test data/bert_mlm/labelled/test.jsonl

MODEL is a folder of finetune.py, the data what it was given; all but the training texts are judged.
`int8` is paramshare.quantize: all matrices that are stored have 8 bits, and so have the inputs of
products. `generated` is the paper's variant: the weights that are generated are rounded to 8 bits,
a row of each by its largest number, and all else is float32.
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from options import NEEDED
from script import check_installed, parser, run_script
from stages import UserError
from texts import examples

BATCH = 64


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    examples.add_options(options)
    return options.parse_args(arguments)


def rounded(model: Any) -> Any:
    """A copy whose shared weights are ordinary ones of 8 bits' precision."""
    import torch

    from paramshare import materialize
    from paramshare.int8 import Int8Matrix, quantise
    from paramshare.sharing import named_pools

    model = copy.deepcopy(model)
    paths = {
        f"{root}.{path}" if root else path
        for root, pool in named_pools(model)
        for group in pool.plan.groups
        for path in group.slots
    }
    materialize(model)
    with torch.no_grad():
        for path in paths:
            weight = model.get_parameter(path)
            weight.copy_(Int8Matrix(*quantise(weight, None), None).dense())
    return model


def logits(model: Any, texts: list[Any], collator: Any) -> Any:
    import torch

    found = []
    with torch.inference_mode():
        for first in range(0, len(texts), BATCH):
            batch = collator(texts[first : first + BATCH])
            del batch["labels"]
            found.append(model(**batch).logits)
    return torch.cat(found)


def judge(folder: Path, data: examples.Data) -> None:
    """Prints a table. UserError."""
    # Not at the top of the file, so that --help and check_installed need nothing installed.
    import numpy as np
    import training
    from folders import load_tokenizer, longest_input
    from texts.classifying import Collator, load_classifier
    from torch.nn import functional as F

    from paramshare import quantize
    from paramshare.report import count_bytes

    model = load_classifier(folder).eval()
    own = [model.config.id2label[number] for number in range(model.config.num_labels)]
    if data.names is not None and own != data.names:
        raise UserError(
            f"{folder} knows the labels {', '.join(own)}, the data has {', '.join(data.names)}: "
            "give the data that it was finetuned on"
        )
    tokenizer = load_tokenizer(folder)
    length = training.choose_length(None, longest_input(model, tokenizer))
    collator = Collator(tokenizer, length, data.names is None)
    models = {
        "float32": model,
        "int8": quantize(copy.deepcopy(model)),
        "generated": rounded(model),
    }
    sizes = {name: f"{count_bytes(each) / 1e6:.2f}" for name, each in models.items()}
    sizes["generated"] = sizes["float32"]  # what is stored is as it was
    splits = {name: texts for name, texts in data.splits.items() if name != "train"}
    print(f"{folder}")
    titles = ["", "stored, MB"]
    for name, texts in splits.items():
        titles += [f"{name} ({len(texts):,})", "changed labels", "cosine of the logits"]
    print(f"| {' | '.join(titles)} |\n{'| --- ' * len(titles)}|")
    before = {}
    for name, each in models.items():
        cells = [name, sizes[name]]
        for split, texts in splits.items():
            found = logits(each, texts, collator)
            exact = before.setdefault(split, found)
            measured = data.measure(found.numpy(), np.array([text.label for text in texts]))
            changed = int((found.argmax(-1) != exact.argmax(-1)).sum())
            cosine = float(F.cosine_similarity(found, exact, dim=-1).mean())
            cells += [f"{next(iter(measured.values())):.2f}", f"{changed}", f"{cosine:.5f}"]
        print(f"| {' | '.join(cells)} |")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed(NEEDED)
        data = examples.load(args)
        for folder in args.models:
            judge(folder, data)

    return run_script("int8.py", body, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
