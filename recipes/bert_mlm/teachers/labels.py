"""A small classifier learns from the logits of a large one."""

import argparse
from pathlib import Path

import numpy as np
import torch
import training
from folders import device, load_tokenizer, longest_input
from stages import UserError
from teachers import teaching
from texts import examples
from texts.classifying import Classifier, Collator, Loss, describe, load_classifier
from texts.examples import Example
from torch import Tensor
from torch.nn import functional as F

BATCH = 64


def distil(args: argparse.Namespace) -> None:
    if not 0 <= args.hard <= 1:
        raise UserError(f"--hard {args.hard} is a weight: use 0 to 1")
    if args.temperature <= 0:
        raise UserError(f"--temperature {args.temperature} must be more than 0")
    data = examples.load(args)
    training.say(data.describe())
    if data.names is None and args.loss == "kl":
        raise UserError("--loss kl compares classes: predicted numbers need --loss mse")
    teacher = Teacher(args.teacher, data.names)
    student = Classifier(args.student, data, args)
    made_from = {
        "teacher": training.digest(args.teacher),
        "student": training.digest(args.student),
        "data": training.digest_of(data.splits),
    }
    results = training.begin(args.out, training.settings_of(args, **made_from))
    if results is None:
        with student.arguments.main_process_first():
            logits = teaching.outputs(
                [example.texts for example in data.splits["train"]],
                teacher.logits,
                teaching.Key("logits", made_from["teacher"], teacher.length),
                args.cache,
            )
        distance = loss(args.loss, args.temperature, args.hard, data.names is None)
        results = student.train((logits, distance))
    training.say(describe(results))


class Teacher:
    """A classifier with the labels `names`; UserError if it has others."""

    def __init__(self, folder: Path, names: list[str] | None) -> None:
        self.model = load_classifier(folder)
        self.tokenizer = load_tokenizer(folder)
        self.length = training.choose_length(None, longest_input(self.model, self.tokenizer))
        found = [str(self.model.config.id2label[n]) for n in range(self.model.config.num_labels)]
        if found != names and not (names is None and len(found) == 1):
            raise UserError(
                f"the teacher of {folder} knows {', '.join(found)}, the texts have"
                f" {', '.join(names or ['numbers'])}"
            )

    def logits(self, texts: teaching.Texts) -> np.ndarray:
        model = self.model.eval().to(device())
        collate = Collator(self.tokenizer, self.length, regression=True)
        order = teaching.shortest_first(texts)
        rows = np.empty((len(texts), model.config.num_labels), np.float32)
        for start in range(0, len(texts), BATCH):
            part = order[start : start + BATCH]
            batch = collate([Example(texts[n], 0.0) for n in part])
            del batch["labels"]
            with torch.no_grad():
                logits = model(**{name: x.to(device()) for name, x in batch.items()}).logits
            rows[part] = logits.float().cpu().numpy()
        return rows


def loss(kind: str, temperature: float, hard: float, regression: bool) -> Loss:
    """`hard` times the loss of the labels, and the rest of what the teacher says."""

    def distance(logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        if regression:
            own = F.mse_loss(logits.view_as(labels), labels)
        else:
            own = F.cross_entropy(logits, labels)
        if kind == "mse":
            taught = F.mse_loss(logits, teacher)
        else:
            guesses, wanted = (F.log_softmax(x / temperature, -1) for x in (logits, teacher))
            # Times the square, gradients are as large at any temperature.
            taught = temperature**2 * F.kl_div(
                guesses, wanted, reduction="batchmean", log_target=True
            )
        return hard * own + (1 - hard) * taught

    return distance
