"""Encoders of ShareBERT's sizes, built without memory: their tensors come later."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder: a table of `vocabulary x features`, layers of `width`."""

    vocabulary: int
    features: int
    width: int
    feed_forward: int
    depth: int

    def one_layer(self) -> Shape:
        return replace(self, depth=1)


HEADS = 16
SHAPES = {
    "Small": Shape(30528, 128, 2048, 4096, 12),
    "Base": Shape(30528, 384, 2048, 4096, 12),
    "Light Base": Shape(30528, 384, 1024, 2048, 4),
    "Light Small": Shape(30528, 128, 768, 2048, 4),
}


class Layer(nn.Module):
    """Attention and feed-forward of separate linear layers, as in BERT."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, wide = shape.width, shape.feed_forward
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)
        self.norm, self.wide_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, length, width)` of the same."""
        y = self.norm(x)
        q, k, v = (
            linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.merge(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.wide_norm(x))))


class Encoder(nn.Module):
    """The embedding, lifted to the layers' width, and the layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.features)
        self.lift = nn.Linear(shape.features, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """`(batch, length, width)` for ids `(batch, length)`."""
        x = self.lift(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return x


def skeleton(shape: Shape) -> Encoder:
    """On the meta device."""
    with torch.device("meta"):
        return Encoder(shape)


def repeat(model: Encoder, depth: int) -> Encoder:
    """The model with its one layer at every depth."""
    model.layers = nn.ModuleList(list(model.layers) * depth)
    return model


@torch.no_grad()
def fill(model: Encoder) -> None:
    """Random values, the same for models of the same sizes. Biases and norms are the same at every
    depth, so that one layer can stand for all of them."""
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    model.embedding.reset_parameters()
    model.lift.reset_parameters()
    for layer in model.layers:
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 1:
                start = float(name.endswith("norm.weight"))
                parameter.copy_(start + torch.linspace(-0.1, 0.1, len(parameter)))
