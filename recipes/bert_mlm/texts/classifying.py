"""Trains a model to label texts, or to predict numbers for them."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import training
from folders import load_model, load_tokenizer, longest_input
from texts.examples import Data, Example
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)


class Taught(NamedTuple):
    """An example with a teacher's outputs for it."""

    texts: tuple[str, ...]
    label: float
    teacher: np.ndarray


# Gets the model's outputs, the labels and the teacher's outputs.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Collator:
    """A batch of examples as tensors. What is longer than `length` is cut off."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int, regression: bool) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.kind = torch.float if regression else torch.long

    def __call__(self, examples: Sequence[Example | Taught]) -> dict[str, Tensor]:
        columns = zip(*(example.texts for example in examples), strict=True)
        batch = self.tokenizer(
            *map(list, columns),
            truncation=True,
            max_length=self.length,
            padding=True,
            return_tensors="pt",
        )
        batch["labels"] = torch.tensor([example.label for example in examples]).to(self.kind)
        if isinstance(examples[0], Taught):
            batch["teacher"] = torch.from_numpy(np.stack([e.teacher for e in examples])).float()
        return dict(batch)


class _Trainer(Trainer):
    """Minimises `distance` for the examples that a teacher has seen: those of the training."""

    distance: Loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        teacher = inputs.pop("teacher", None)
        outputs = model(**inputs)
        loss = outputs.loss
        if teacher is not None:
            loss = self.distance(outputs.logits, inputs["labels"], teacher)
        return (loss, outputs) if return_outputs else loss


class Classifier:
    """The model of `folder` with a new head for the labels of `data`. UserError."""

    def __init__(self, folder: Path, data: Data, args: argparse.Namespace) -> None:
        self.data, self.out = data, args.out
        self.arguments = training.arguments(args, label_names=["labels"])
        set_seed(args.seed)  # of the head
        names = data.names or ["value"]
        self.model = load_classifier(
            folder,
            num_labels=len(names),
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
            problem_type="regression" if data.names is None else "single_label_classification",
            ignore_mismatched_sizes=True,  # of a head for other labels
        )
        self.tokenizer = load_tokenizer(folder)
        length = training.choose_length(args.length, longest_input(self.model, self.tokenizer))
        self.collator = Collator(self.tokenizer, length, data.names is None)

    def train(self, taught: tuple[np.ndarray, Loss] | None = None) -> dict[str, Any]:
        """Writes the folder and returns the results.

        taught: a teacher's outputs for the training texts, and the loss that compares them.
        """
        examples: Sequence[Example | Taught] = self.data.splits["train"]
        if taught is not None:
            examples = [Taught(*e, row) for e, row in zip(examples, taught[0], strict=True)]
        trainer = _Trainer(
            self.model,
            self.arguments,
            data_collator=self.collator,
            train_dataset=examples,
            eval_dataset=self.data.splits["dev"],
            processing_class=self.tokenizer,
            compute_metrics=lambda found: self.data.measure(found.predictions, found.label_ids),
        )
        if taught is not None:
            trainer.distance = taught[1]
        training.train(trainer, self.out)
        results: dict[str, Any] = {"parameters": sum(p.numel() for p in self.model.parameters())}
        for split in list(self.data.splits)[1:]:
            found = trainer.predict(self.data.splits[split])
            results[split] = self.data.measure(found.predictions, found.label_ids)
        training.finish(trainer, self.out, results)
        return results


def load_classifier(folder: Path, **options: Any) -> Any:
    """UserError."""
    return load_model(AutoModelForSequenceClassification, folder, **options)


def describe(results: dict[str, Any]) -> str:
    lines = [f"{results['parameters']:,} parameters"]
    for split, measured in results.items():
        if split != "parameters":
            found = (f"{name} {value:.2f}" for name, value in measured.items())
            lines.append(f"{split}: {', '.join(found)}")
    return "\n".join(lines)
