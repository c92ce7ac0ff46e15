"""CIDEr of the captions of validation pictures, while a captioner is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.logging import metrics
from torch import nn

from paramshare.tasks.caption_text import words
from paramshare.tasks.cider import CiderD

SCORED, TOTAL = "_captioned", "_cider"  # names in the logging outputs


class CaptionScorer:
    """Captions a split and scores it as recipes/coco_captioning/score.py does without Java: words
    are what `caption_text.words` takes for them, whatever the tokens of the model are, and the
    document frequencies are those of the split.

    pictures: the id of each pair's picture; each picture is captioned once. captions: of each.
    """

    def __init__(
        self, task: Any, pictures: Sequence[int], captions: Mapping[int, Sequence[str]], beam: int
    ) -> None:
        self.task, self.pictures = task, pictures
        self.options = replace(GenerationConfig(), beam=beam, max_len_b=task.LONGEST)
        self.first = {picture: n for n, picture in reversed(list(enumerate(pictures)))}
        references = {picture: list(map(words, texts)) for picture, texts in captions.items()}
        self.cider = CiderD(references.values())
        self.references = {
            picture: [self.cider.vector(text) for text in texts]
            for picture, texts in references.items()
        }

    @torch.no_grad()
    def score(self, model: nn.Module, sample: dict[str, Any]) -> dict[str, float]:
        """For the logging outputs: how many pictures were captioned, and their CIDEr-D in all."""
        pairs = sample["id"].tolist()
        rows = [row for row, n in enumerate(pairs) if self.first[self.pictures[n]] == n]
        total = 0.0
        if rows:
            inputs = {
                name: sample["net_input"][name][rows] for name in ("src_tokens", "src_lengths")
            }
            generator = self.task.build_generator([model], self.options)
            found = self.task.inference_step(generator, [model], {"net_input": inputs})
            for row, best in zip(rows, found, strict=True):
                caption = words(self.task.decode(best[0]["tokens"]))
                total += self.cider.score(caption, self.references[self.pictures[pairs[row]]])
        return {SCORED: len(rows), TOTAL: total}


def log_cider(logging_outputs: Sequence[Mapping[str, Any]]) -> None:
    """Of all batches of all processes, in the unit of papers: 100 times the mean."""
    scored = sum(x.get(SCORED, 0) for x in logging_outputs)
    if scored:
        total = sum(x.get(TOTAL, 0) for x in logging_outputs)
        metrics.log_scalar("cider", float(100 * total / scored), int(scored), round=2)
