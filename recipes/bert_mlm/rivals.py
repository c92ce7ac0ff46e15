"""Other ways to make a BERT small: a low-rank one, whose classes load through the Auto classes.
(ALBERT is transformers' own; a narrow BERT is ours without sharing.)"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from paramshare.models.sharebert_pretrained import (
    ShareBertConfig,
    ShareBertForMaskedLM,
    ShareBertForSequenceClassification,
    ShareBertModel,
)


class LowRankBertConfig(ShareBertConfig):
    """ShareBERT without sharing, each weight a product of two of `rank`."""

    model_type = "low-rank-bert"

    def __init__(self, rank: int = 16, **options: Any) -> None:
        super().__init__(**{**options, "sharing": "none"})
        self.rank = rank


class _LowRank:
    config_class = LowRankBertConfig

    def _finish(self) -> None:
        for layer in self.bert.layers:  # type: ignore[attr-defined]
            for name, linear in list(layer.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(layer, name, low_rank(linear, self.config.rank, self.config))  # type: ignore[attr-defined]
        super()._finish()  # type: ignore[misc]


def low_rank(linear: nn.Linear, rank: int, config: LowRankBertConfig) -> nn.Sequential:
    """Two layers in the place of one; their product starts with the spread that it had."""
    down = nn.Linear(linear.in_features, rank, bias=False)
    up = nn.Linear(rank, linear.out_features)
    for factor in (down, up):
        nn.init.normal_(factor.weight, std=(config.initializer_range**2 / rank) ** 0.25)
    nn.init.zeros_(up.bias)
    return nn.Sequential(down, up)


class LowRankBertModel(_LowRank, ShareBertModel):
    pass


class LowRankBertForMaskedLM(_LowRank, ShareBertForMaskedLM):
    pass


class LowRankBertForSequenceClassification(_LowRank, ShareBertForSequenceClassification):
    pass


AutoConfig.register(LowRankBertConfig.model_type, LowRankBertConfig)
AutoModel.register(LowRankBertConfig, LowRankBertModel)
AutoModelForMaskedLM.register(LowRankBertConfig, LowRankBertForMaskedLM)
AutoModelForSequenceClassification.register(LowRankBertConfig, LowRankBertForSequenceClassification)
