"""Captioners for fairseq: an image encoder with one of fairseq's own decoders.

`--arch caption_transformer`, `caption_lstm` (Luong attention, input feeding) and `caption_fconv`
(ConvS2S), of the task `shared_captioning`. Their default sizes are for COCO. The encoder makes a
memory of grid or region features, or of pictures through a backbone; it reads no tokens, so that
all shared weights are read from the decoder's table.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

try:
    from fairseq.dataclass import FairseqDataclass
except ImportError as error:
    raise ImportError(
        f"paramshare.models.captioner needs fairseq ({error}): pip install 'paramshare[fairseq]'"
    ) from error
from fairseq.models import (
    FairseqEncoder,
    FairseqEncoderDecoderModel,
    register_model,
)
from fairseq.models.fconv import FConvDecoder
from fairseq.models.lstm import LSTMDecoder
from fairseq.models.transformer import Embedding as embedding
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn

from paramshare.errors import ShareError

# ---------------------------------------------------------------------- the encoder


class ImageEncoder(FairseqEncoder):
    """Features of pictures to a memory: one vector of `width` a cell of the grid, or a region.

    backbone: makes features `(pictures, cells, feature_width)` of pixels; None where these are what
    comes in. finetune: trains it, too; its batch norms keep their statistics all the same, for
    those of a small batch are worse.
    """

    def __init__(
        self,
        feature_width: int,
        width: int,
        dropout: float,
        backbone: nn.Module | None = None,
        finetune: bool = False,
    ) -> None:
        super().__init__(None)
        self.finetune = finetune
        self.backbone = backbone
        if backbone is not None:
            backbone.requires_grad_(finetune)
        self.project = nn.Linear(feature_width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def train(self, mode: bool = True) -> "ImageEncoder":
        super().train(mode)
        if self.backbone is not None:
            for part in self.backbone.modules():
                if not self.finetune or isinstance(part, nn.modules.batchnorm._BatchNorm):
                    part.eval()
        return self

    def memory(self, src_tokens: Tensor, src_lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        """`(cells, pictures, width)`, and where it is padding: `(pictures, cells)`, None where
        nothing is.

        src_tokens: features `(pictures, cells, feature_width)`, or pixels `(pictures, 3, height,
        width)`. src_lengths: how many cells each picture has; of no meaning for pixels. (fairseq
        calls the inputs of all encoders so.)
        """
        x = src_tokens.to(self.project.weight.dtype)
        padding = None
        if self.backbone is not None:
            with torch.set_grad_enabled(self.finetune and torch.is_grad_enabled()):
                x = self.backbone(x)
        elif (src_lengths != x.shape[1]).any():
            padding = torch.arange(x.shape[1], device=x.device) >= src_lengths[:, None]
        return self.dropout(self.norm(self.project(x))).transpose(0, 1), padding

    def max_positions(self) -> int:
        return 100_000  # cells are not positions: no limit


class TransformerImageEncoder(ImageEncoder):
    """With layers of self-attention. The memory is what fairseq's TransformerDecoder reads."""

    def __init__(self, cfg: TransformerConfig, *args: Any) -> None:
        super().__init__(*args)
        self.layers = nn.ModuleList(
            TransformerEncoderLayerBase(cfg) for _ in range(cfg.encoder.layers)
        )
        self.last_norm = (
            nn.LayerNorm(cfg.encoder.embed_dim) if cfg.encoder.normalize_before else None
        )

    def forward(self, src_tokens: Tensor, src_lengths: Tensor) -> dict[str, list[Tensor]]:
        x, padding = self.memory(src_tokens, src_lengths)
        for layer in self.layers:
            x = layer(x, padding)
        if self.last_norm is not None:
            x = self.last_norm(x)
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [] if padding is None else [padding],
        }

    def reorder_encoder_out(
        self, encoder_out: dict[str, list[Tensor]], new_order: Tensor
    ) -> dict[str, list[Tensor]]:
        places = {"encoder_out": 1, "encoder_padding_mask": 0}
        return {
            name: [x.index_select(place, new_order) for x in encoder_out[name]]
            for name, place in places.items()
        }


class LSTMImageEncoder(ImageEncoder):
    """The decoder's first states are read from the mean of the memory, as in Show, Attend and
    Tell (https://arxiv.org/abs/1502.03044, section 3.1.2)."""

    def __init__(self, layers: int, feature_width: int, width: int, *args: Any) -> None:
        super().__init__(feature_width, width, *args)
        self.layers = layers
        self.hidden = nn.Linear(width, width)
        self.cell = nn.Linear(width, width)

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        x, padding = self.memory(src_tokens, src_lengths)
        if padding is None:
            mean, mask = x.mean(0), None
        else:
            mask = padding.t()
            there = (~mask).unsqueeze(-1).to(x)
            mean = (x * there).sum(0) / there.sum(0)
        first = (torch.tanh(linear(mean)) for linear in (self.hidden, self.cell))
        hidden, cell = (state.expand(self.layers, -1, -1) for state in first)
        return x, hidden, cell, mask

    def reorder_encoder_out(
        self, encoder_out: tuple[Tensor | None, ...], new_order: Tensor
    ) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.index_select(1, new_order) for x in encoder_out)


class ConvImageEncoder(ImageEncoder):
    """The memory is key and value of ConvS2S's attention.

    It starts with the spread of fairseq's token embeddings there: what attention reads is added,
    in each layer, to sums of those, times the root of the number of cells.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        nn.init.constant_(self.norm.weight, 0.1)

    def forward(self, src_tokens: Tensor, src_lengths: Tensor) -> dict[str, Any]:
        x, padding = self.memory(src_tokens, src_lengths)
        x = x.transpose(0, 1)
        return {"encoder_out": (x, x), "encoder_padding_mask": padding}

    def reorder_encoder_out(self, encoder_out: dict[str, Any], new_order: Tensor) -> dict[str, Any]:
        mask = encoder_out["encoder_padding_mask"]
        return {
            "encoder_out": tuple(x.index_select(0, new_order) for x in encoder_out["encoder_out"]),
            "encoder_padding_mask": None if mask is None else mask.index_select(0, new_order),
        }


# ---------------------------------------------------------------------- the models


# fairseq makes its parser from the types themselves: no postponed annotations in this file.
def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class CaptionerOptions(FairseqDataclass):
    decoder_embed_dim: int = _option(512, "features of the token table")
    dropout: float = _option(0.1, "dropout")
    share_decoder_input_output_embed: bool = _option(
        False, "the output layer is the token table; needs an output of its width"
    )
    max_caption: int = _option(64, "most tokens of a caption")


@dataclass
class TransformerCaptionerOptions(CaptionerOptions):
    width: int = _option(512, "width of the layers; another than the table's is projected to it")
    ffn_width: int = _option(2048, "width of the feed-forward networks")
    attention_heads: int = _option(8, "heads")
    encoder_layers: int = _option(3, "layers over the cells of a picture")
    decoder_layers: int = _option(6, "layers over the tokens")
    normalize_before: bool = _option(False, "norms before the layers instead of after them")
    attention_dropout: float = _option(0.0, "dropout of attention probabilities")


@dataclass
class LSTMCaptionerOptions(CaptionerOptions):
    hidden_size: int = _option(512, "width of the LSTM and of the memory")
    decoder_layers: int = _option(2, "layers")


@dataclass
class ConvCaptionerOptions(CaptionerOptions):
    channels: int = _option(512, "channels of the convolutions")
    kernel_size: int = _option(3, "tokens that a convolution sees")
    decoder_layers: int = _option(6, "convolutions, each with attention")


def _picture(cfg: Any, task: Any, width: int) -> tuple[Any, ...]:
    """What every ImageEncoder is made of; `width` of its memory. Raises ShareError where the task
    has no pictures."""
    if not hasattr(task, "feature_width"):
        raise ShareError(f"--arch {cfg._name} needs --task shared_captioning")
    backbone = task.build_backbone()
    return task.feature_width, width, cfg.dropout, backbone, task.cfg.finetune_backbone


@register_model("caption_transformer", dataclass=TransformerCaptionerOptions)
class TransformerCaptioner(FairseqEncoderDecoderModel):
    """A Transformer; its table may be wider or narrower than its layers."""

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> FairseqEncoderDecoderModel:
        dictionary = task.target_dictionary
        sizes = TransformerConfig()
        for side, layers in (
            (sizes.encoder, cfg.encoder_layers),
            (sizes.decoder, cfg.decoder_layers),
        ):
            side.embed_dim, side.ffn_embed_dim, side.layers = cfg.width, cfg.ffn_width, layers
            side.attention_heads, side.normalize_before = cfg.attention_heads, cfg.normalize_before
        sizes.decoder.input_dim = sizes.decoder.output_dim = cfg.decoder_embed_dim
        sizes.dropout, sizes.attention_dropout = cfg.dropout, cfg.attention_dropout
        sizes.max_target_positions = cfg.max_caption
        sizes.share_decoder_input_output_embed = cfg.share_decoder_input_output_embed
        table = embedding(len(dictionary), cfg.decoder_embed_dim, dictionary.pad())
        decoder = TransformerDecoderBase(sizes, dictionary, table)
        encoder = TransformerImageEncoder(sizes, *_picture(cfg, task, cfg.width))
        return cls(encoder, decoder)


@register_model("caption_lstm", dataclass=LSTMCaptionerOptions)
class LSTMCaptioner(FairseqEncoderDecoderModel):
    """An LSTM with attention."""

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> FairseqEncoderDecoderModel:
        dictionary = task.target_dictionary
        decoder = LSTMDecoder(
            dictionary,
            embed_dim=cfg.decoder_embed_dim,
            hidden_size=cfg.hidden_size,
            out_embed_dim=cfg.decoder_embed_dim,
            num_layers=cfg.decoder_layers,
            dropout_in=cfg.dropout,
            dropout_out=cfg.dropout,
            encoder_output_units=cfg.hidden_size,
            share_input_output_embed=cfg.share_decoder_input_output_embed,
            max_target_positions=cfg.max_caption,
        )
        picture = _picture(cfg, task, cfg.hidden_size)
        return cls(LSTMImageEncoder(cfg.decoder_layers, *picture), decoder)


@register_model("caption_fconv", dataclass=ConvCaptionerOptions)
class ConvCaptioner(FairseqEncoderDecoderModel):
    """ConvS2S: convolutions with attention in each."""

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> FairseqEncoderDecoderModel:
        dictionary = task.target_dictionary
        decoder = FConvDecoder(
            dictionary,
            embed_dim=cfg.decoder_embed_dim,
            out_embed_dim=cfg.decoder_embed_dim,
            max_positions=cfg.max_caption,
            convolutions=((cfg.channels, cfg.kernel_size),) * cfg.decoder_layers,
            dropout=cfg.dropout,
            share_embed=cfg.share_decoder_input_output_embed,
        )
        return cls(ConvImageEncoder(*_picture(cfg, task, cfg.decoder_embed_dim)), decoder)
