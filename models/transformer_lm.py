"""A small causal language model of torch's own layers, for examples and benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TransformerLM(nn.Module):
    """Token and learned position embeddings, `nn.TransformerEncoder`, output tied to the table.

    tokens: vocabulary size; width, feed_forward, heads, layers: of the encoder; length: the
    longest input. Build it with `device="meta"` to allocate nothing.
    """

    def __init__(
        self,
        tokens: int,
        width: int = 256,
        layers: int = 6,
        heads: int = 4,
        feed_forward: int | None = None,
        length: int = 512,
        dropout: float = 0.1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width, device=device)
        self.positions = nn.Embedding(length, width, device=device)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            feed_forward or 4 * width,
            dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
            device=device,
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width, device=device), enable_nested_tensor=False
        )
        self.output = nn.Linear(width, tokens, bias=False, device=device)
        self.output.weight = self.embedding.weight
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `(batch, length, vocabulary)` of the next token, for tokens `(batch, length)`."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        return self.output(self.encoder(x, mask=mask, is_causal=True))
