"""Vectors of words, compared with what people say of them.

The vector of a word of several pieces is the mean of theirs.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measures import metrics
from stages import UserError, read_lines
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

BATCH = 256


class Pair(NamedTuple):
    """Two words and how similar people find them."""

    first: str
    second: str
    rating: float


class Words:
    """Words as a model sees them: `table` without context (rows of its token table, as its
    embedding gives them), `alone` as the only word of a text, out of the last layer."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer

    def pieces(self, words: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(words), add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def table(self, words: Sequence[str]) -> Tensor:
        embedding = self.model.get_input_embeddings()
        device = embedding.weight.device
        return torch.stack(
            [
                embedding(torch.tensor(ids, device=device)).mean(0).cpu()
                for ids in self.pieces(words)
            ]
        )

    @torch.no_grad()
    def alone(self, words: Sequence[str]) -> Tensor:
        found = []
        for start in range(0, len(words), BATCH):
            batch = self.tokenizer(
                list(words[start : start + BATCH]),
                padding=True,
                return_special_tokens_mask=True,
                return_tensors="pt",
            ).to(self.model.device)
            of_word = (batch.pop("special_tokens_mask") == 0).unsqueeze(-1).float()
            states = self.model(**batch).last_hidden_state
            found.append(((states * of_word).sum(1) / of_word.sum(1).clamp_min(1)).cpu())
        return torch.cat(found)

    def single(self, words: Sequence[str]) -> list[int | None]:
        """The id of each word that is one known piece."""
        unknown = self.tokenizer.unk_token_id
        return [
            ids[0] if len(ids) == 1 and ids[0] != unknown else None for ids in self.pieces(words)
        ]


def similarity(words: Words, pairs: Sequence[Pair]) -> dict[str, float]:
    """Spearman's correlation of cosines and ratings for both kinds of vectors, and the share of
    the pairs whose words are single pieces, in %."""
    first, second = [pair.first for pair in pairs], [pair.second for pair in pairs]
    ratings = np.array([pair.rating for pair in pairs])

    def correlation(vectors: Callable[[Sequence[str]], Tensor]) -> float:
        cosines = F.cosine_similarity(vectors(first), vectors(second))
        return metrics.spearman(cosines.numpy(), ratings)

    ids = zip(words.single(first), words.single(second), strict=True)
    return {
        "table": correlation(words.table),
        "alone": correlation(words.alone),
        "single": 100 * float(np.mean([None not in pair for pair in ids])),
    }


def analogies(words: Words, questions: Sequence[Sequence[str]]) -> dict[str, float | None]:
    """How often the word nearest to b - a + c (unit vectors of the table, 3CosAdd) among all others
    that are single pieces is d, in %, and the share of the questions that could be asked: those of
    single pieces. None where there are none."""
    asked = [
        ids
        for ids in zip(*map(words.single, zip(*questions, strict=True)), strict=True)
        if None not in ids
    ]
    if not asked:
        return {"accuracy": None, "asked": 0.0}
    candidates = _whole_words(words.tokenizer)
    candidates = torch.tensor(sorted({*candidates, *(id for ids in asked for id in ids)}))
    with torch.no_grad():
        embedding = words.model.get_input_embeddings()
        vectors = embedding(candidates.to(embedding.weight.device)).float().cpu()
    places = torch.searchsorted(candidates, torch.tensor(asked))
    found = solve(F.normalize(vectors, dim=-1), places[:, :3])
    return {
        "accuracy": metrics.accuracy(found.numpy(), places[:, 3].numpy()),
        "asked": 100 * len(asked) / len(questions),
    }


def solve(vectors: Tensor, questions: Tensor) -> Tensor:
    """The row of the unit `vectors` nearest to b - a + c for each question `(a, b, c)`, which are
    no answers themselves."""
    answers = []
    for part in questions.split(BATCH):
        a, b, c = vectors[part].unbind(1)
        scores = (b - a + c) @ vectors.T
        answers.append(scores.scatter(1, part, -torch.inf).argmax(1))
    return torch.cat(answers)


def _whole_words(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of the pieces that are words by themselves."""
    texts = [tokenizer.decode([id]).strip() for id in range(len(tokenizer))]
    pieces = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [
        id
        for id, (text, ids) in enumerate(zip(texts, pieces, strict=True))
        if ids == [id] and text.isalpha()
    ]


def read_pairs(path: Path) -> list[Pair]:
    """Lines with two words and a rating, set apart by tabs; # starts a comment. UserError."""
    pairs = []
    for number, line in _lines(path):
        try:
            first, second, rating = line.split("\t")
            pairs.append(Pair(first, second, float(rating)))
            if not math.isfinite(pairs[-1].rating):
                raise ValueError
        except ValueError:
            raise UserError(f"{path}, line {number}: not two words and a rating") from None
    return pairs


def read_questions(path: Path) -> list[list[str]]:
    """Lines of four words; those that start with a colon are headings. UserError."""
    questions = []
    for number, line in _lines(path):
        if not line.startswith(":"):
            questions.append(line.split())
            if len(questions[-1]) != 4:
                raise UserError(f"{path}, line {number}: not four words")
    return questions


def _lines(path: Path) -> list[tuple[int, str]]:
    if not path.is_file():
        raise UserError(f"{path} is not there: run prepare.py first, or give its --data")
    lines = [(n, line) for n, line in enumerate(read_lines(path), 1) if line.strip()]
    found = [(number, line) for number, line in lines if not line.startswith("#")]
    if not found:
        raise UserError(f"{path} is empty")
    return found
