"""The models by name: those of the comparison, small enough for two cores, and the papers'."""

from __future__ import annotations

from typing import Any

from rivals import LowRankBertConfig, OneLayerBertConfig
from stages import UserError
from transformers import PreTrainedConfig

from paramshare.models.sharebert import PRESETS
from paramshare.models.sharebert_pretrained import ShareBertConfig

# No dropout: in the comparison none of them sees a text twice.
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _sizes(features: int, width: int, layers: int = 4) -> dict[str, Any]:
    return {
        "embedding_size": features,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        # BERT's 0.02 is for its width: of so narrow layers it makes next to nothing.
        "initializer_range": width**-0.5,
    }


_SHARE = _sizes(64, 192)
_OWN = {**_SHARE, "depth": "none"}
LINEUP: dict[str, tuple[str, type[PreTrainedConfig], dict[str, Any]]] = {
    "bert": ("BERT, dense", ShareBertConfig, {**_sizes(192, 192), "sharing": "none"}),
    # Of the 64 columns of its table it needs all.
    "share-eps": ("ShareBERT, EPS", ShareBertConfig, {**_SHARE, "sharing": "eps"}),
    "share-column": ("ShareBERT, VEPS column", ShareBertConfig, {**_SHARE, "layout": "column"}),
    "share": ("ShareBERT, VEPS aligned", ShareBertConfig, _SHARE),
    "share-blocks": ("ShareBERT, VEPS, 2 blocks", ShareBertConfig, {**_SHARE, "blocks": 2}),
    "share-each-depth": ("ShareBERT, VEPS, own layers", ShareBertConfig, _OWN),
    "share-half-width": ("ShareBERT, half the width", ShareBertConfig, _sizes(64, 96)),
    "share-half-depth": ("ShareBERT, half the depth", ShareBertConfig, _sizes(64, 192, 2)),
    # At the stored size of "share".
    "bert-narrow": ("BERT, narrow", ShareBertConfig, {**_sizes(52, 52), "sharing": "none"}),
    "albert": ("ALBERT: one layer", OneLayerBertConfig, _sizes(48, 116)),
    "low-rank": ("BERT, low-rank", LowRankBertConfig, {**_sizes(48, 128), "rank": 17}),
}


def configuration(name: str, vocab_size: int, length: int) -> PreTrainedConfig:
    """The configuration of a model of the comparison, or of one of the papers' models.

    vocab_size: of the tokenizer; a paper's model rounds it up to a multiple of 8.
    """
    if name in PRESETS:
        longest = max(length, ShareBertConfig().max_position_embeddings)
        padded = -(-vocab_size // 8) * 8
        return ShareBertConfig.preset(name, vocab_size=padded, max_position_embeddings=longest)
    if name not in LINEUP:
        raise UserError(f"model {name!r} is unknown: use one of {', '.join((*PRESETS, *LINEUP))}")
    _, kind, options = LINEUP[name]
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": length}
    return kind(**{**options, **_NO_DROPOUT, **sizes})
