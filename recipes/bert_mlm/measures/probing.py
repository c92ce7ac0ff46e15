"""Which layer knows what: a linear probe on the frozen vectors of each layer.

The data is that of edge probing: a JSON object a line, {"text": ..., "targets": [{"span1": [s, e],
"span2": [s, e], "label": ...}]}; spans count the words between spaces, the end is not part of the
span, and span2 is there in all targets or in none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measures import metrics
from stages import UserError
from texts.rows import read_rows
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

BATCH = 32
MOST_TARGETS = 20_000  # of a file are used: of all layers, their vectors are in memory
DECAY = 1e-3
STEPS = 100


class Target(NamedTuple):
    spans: tuple[tuple[int, int], ...]
    label: str


class Text(NamedTuple):
    words: list[str]
    targets: list[Target]


@dataclass
class Profile:
    """The probe's scores at each layer, the embeddings first; `centre` is the mean layer, weighted
    by how much better each is than the worst, None where all are as good."""

    accuracy: list[float]
    macro_f1: list[float]
    left_out: int  # targets beyond the model's longest input
    centre: float | None = field(init=False)

    def __post_init__(self) -> None:
        gains = np.array(self.accuracy) - min(self.accuracy)
        self.centre = float(gains @ np.arange(len(gains)) / gains.sum()) if gains.any() else None


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of two profiles. The deeper one is read at the relative depths of the other."""
    layers = min(len(first), len(second))
    depths = np.linspace(0, 1, layers)
    read = (np.interp(depths, np.linspace(0, 1, len(scores)), scores) for scores in (first, second))
    return metrics.spearman(*read)


def profile(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    train: Sequence[Text],
    test: Sequence[Text],
) -> Profile:
    labels = sorted({target.label for text in train for target in text.targets})
    ids = {label: number for number, label in enumerate(labels)}
    (x, found), (x_test, found_test) = (
        _vectors(model, tokenizer, longest, texts) for texts in (train, test)
    )
    if not found or not found_test:
        raise UserError("no target lies within the model's longest input")
    y, y_test = (torch.tensor([ids[t.label] for t in targets]) for targets in (found, found_test))
    accuracy, macro_f1 = [], []
    for layer, layer_test in zip(x, x_test, strict=True):
        guesses = probe(layer.float(), y, layer_test.float()).numpy()
        accuracy.append(metrics.accuracy(guesses, y_test.numpy()))
        macro_f1.append(metrics.macro_f1(guesses, y_test.numpy()))
    everything = sum(len(text.targets) for text in (*train, *test))
    return Profile(accuracy, macro_f1, everything - len(found) - len(found_test))


def probe(x: Tensor, y: Tensor, x_test: Tensor) -> Tensor:
    """Classes of `x_test` by logistic regression on `x`, features being standardised."""
    mean, spread = x.mean(0), x.std(0, correction=0).clamp_min(1e-6)
    x, x_test = (x - mean) / spread, (x_test - mean) / spread
    linear = nn.Linear(x.shape[1], int(y.max()) + 1)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    optimizer = torch.optim.LBFGS(
        linear.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(linear(x), y) + DECAY / 2 * linear.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return linear(x_test).argmax(-1)


@torch.no_grad()
def _vectors(
    model: Any, tokenizer: PreTrainedTokenizerBase, longest: int, texts: Sequence[Text]
) -> tuple[list[Tensor], list[Target]]:
    """Of each layer the vectors of all targets, the means of their spans; and these targets: those
    that lie within the longest input."""
    layers: list[list[Tensor]] = []
    kept = []
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        batch = tokenizer(
            [text.words for text in part],
            is_split_into_words=True,
            truncation=True,
            max_length=longest,
            padding=True,
            return_tensors="pt",
        )
        states = model(**batch.to(model.device), output_hidden_states=True).hidden_states
        layers = layers or [[] for _ in states]
        for row, text in enumerate(part):
            places = np.array([-1 if w is None else w for w in batch.word_ids(row)])
            for target in text.targets:
                inside = [(places >= s) & (places < e) for s, e in target.spans]
                if all(e - 1 in places for _, e in target.spans):
                    kept.append(target)
                    for layer, x in zip(layers, states, strict=True):
                        spans = [x[row, torch.from_numpy(i).to(x.device)].mean(0) for i in inside]
                        layer.append(torch.cat(spans).half().cpu())
    return [torch.stack(layer) for layer in layers if layer], kept


def read(path: Path) -> list[Text]:
    """UserError where a line is not as it should be."""
    texts, kinds, count = [], set(), 0
    for place, row in read_rows(path):
        try:
            words = row["text"].split()
            targets = [_target(target) for target in row["targets"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(
                f'{place} is not {{"text": ..., "targets": [{{"span1": [s, e], "label": ...}}]}}'
            ) from None
        for target in targets:
            kinds.add(len(target.spans))
            for start, end in target.spans:
                if not 0 <= start < end <= len(words):
                    raise UserError(
                        f"{place} has the span [{start}, {end}], but {len(words)} words"
                    )
        count += len(targets)
        texts.append(Text(words, targets))
        if count >= MOST_TARGETS:
            break
    if not count:
        raise UserError(f"{path} has no targets")
    if len(kinds) > 1:
        raise UserError(f"{path}: span2 is in some targets only")
    return texts


def check_labels(train: Sequence[Text], test: Sequence[Text], path: Path) -> None:
    """UserError if the test file has a label that cannot be learned."""
    labels, new = ({t.label for text in texts for t in text.targets} for texts in (train, test))
    if new - labels:
        raise UserError(f"{path}: label {min(new - labels)!r} is not in the training file")


def _target(target: dict[str, Any]) -> Target:
    spans = [target[name] for name in ("span1", "span2") if name in target]
    if not isinstance(target["label"], str) or "span1" not in target:
        raise TypeError
    if any(type(edge) is not int for span in spans for edge in span):
        raise TypeError
    return Target(tuple((start, end) for start, end in spans), target["label"])
