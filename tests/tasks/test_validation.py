"""CIDEr while a captioner is trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq", reason="needs the fairseq extra")

from fairseq.logging import metrics

from paramshare.tasks.validation import CaptionScorer, log_cider

# Captions of pictures 7, 8, 9; the second has two, so it is in two pairs.
CAPTIONS = {7: ["A red circle."], 8: ["a blue square", "One square!"], 9: ["a dog, and a cat"]}
PAIRS = [7, 8, 8, 9]
SAID = {7: "a red circle", 8: "one blue square", 9: "a cat"}


class Task:
    """Says what SAID has for a picture, whose id is its only pixel."""

    LONGEST = 30

    def __init__(self) -> None:
        self.captioned: list[int] = []

    def build_generator(self, models, options):
        assert options.beam == 5
        return None

    def inference_step(self, generator, models, sample):
        found = sample["net_input"]["src_tokens"].flatten().tolist()
        assert sample["net_input"]["src_lengths"].tolist() == [1] * len(found)
        self.captioned += found
        return [[{"tokens": picture}] for picture in found]

    def decode(self, tokens):
        return SAID[tokens]


def batch(pairs: list[int]) -> dict:
    pictures = torch.tensor([PAIRS[n] for n in pairs])
    inputs = {"src_tokens": pictures[:, None, None], "src_lengths": torch.ones_like(pictures)}
    return {"id": torch.tensor(pairs), "net_input": inputs}


def test_each_picture_once_and_as_papers_score() -> None:
    """In whatever batches, the mean is pycocoevalcap's."""
    cider = pytest.importorskip("pycocoevalcap.cider.cider")
    task = Task()
    scorer = CaptionScorer(task, PAIRS, CAPTIONS, beam=5)
    logged = [scorer.score(SimpleNamespace(), batch(pairs)) for pairs in ([3, 1], [2], [0])]
    assert task.captioned == [9, 8, 7]  # not the second pair of 8
    with metrics.aggregate("valid") as found:
        log_cider(logged)
    plain = {
        7: ["a red circle"],
        8: ["a blue square", "one square"],
        9: ["a dog and a cat"],
    }
    expected, _ = cider.Cider().compute_score(plain, {n: [text] for n, text in SAID.items()})
    assert found["cider"].avg == pytest.approx(100 * expected, abs=1e-6)


def test_nothing_captioned_is_nothing_logged() -> None:
    with metrics.aggregate("train") as found:
        log_cider([{"loss": 1.0}])
    assert "cider" not in found
