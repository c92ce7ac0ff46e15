"""Rivals: other ways to make the same encoder small. Their classes load through the Auto classes.
(A narrow BERT is ours without sharing.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from paramshare.models.sharebert import Layer
from paramshare.models.sharebert_pretrained import (
    ShareBertConfig,
    ShareBertForMaskedLM,
    ShareBertForSequenceClassification,
    ShareBertModel,
)

# ---------------------------------------------------------------------- ALBERT: one layer


class OneLayerBertConfig(ShareBertConfig):
    """ShareBERT without sharing from the table, one layer standing at every depth."""

    model_type = "one-layer-bert"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "sharing": "none"})


class Repeated(nn.ModuleList):
    """One layer, so many times over."""

    def __init__(self, layer: Layer, times: int) -> None:
        super().__init__([layer])
        self.times = times

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[0] for _ in range(self.times))


class _OneLayer:
    config_class = OneLayerBertConfig

    def _finish(self) -> None:
        layers = self.bert.layers  # type: ignore[attr-defined]
        self.bert.layers = Repeated(layers[0], len(layers))  # type: ignore[attr-defined]
        super()._finish()  # type: ignore[misc]


class OneLayerBertModel(_OneLayer, ShareBertModel):
    pass


class OneLayerBertForMaskedLM(_OneLayer, ShareBertForMaskedLM):
    pass


class OneLayerBertForSequenceClassification(_OneLayer, ShareBertForSequenceClassification):
    pass


# ---------------------------------------------------------------------- low rank


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


# ---------------------------------------------------------------------- Auto classes

for _config, _model, _masked_lm, _classifier in (
    (
        OneLayerBertConfig,
        OneLayerBertModel,
        OneLayerBertForMaskedLM,
        OneLayerBertForSequenceClassification,
    ),
    (
        LowRankBertConfig,
        LowRankBertModel,
        LowRankBertForMaskedLM,
        LowRankBertForSequenceClassification,
    ),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _model)
    AutoModelForMaskedLM.register(_config, _masked_lm)
    AutoModelForSequenceClassification.register(_config, _classifier)
