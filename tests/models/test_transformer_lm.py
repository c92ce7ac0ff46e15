from __future__ import annotations

import torch

from paramshare import materialize, share_from_embedding
from paramshare.models import TransformerLM


def test_is_causal() -> None:
    model = TransformerLM(50, 16, 2, heads=2, length=12).eval()
    tokens = torch.randint(0, 50, (2, 9))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 50
    a, b = model(tokens), model(changed)
    assert a.shape == (2, 9, 50)
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_learns_when_shared() -> None:
    torch.manual_seed(0)
    model = TransformerLM(50, 32, 3, heads=2, feed_forward=64, length=16, dropout=0.0)
    share_from_embedding(model, model.embedding)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    tokens = torch.randint(0, 50, (8, 1)) + torch.arange(12)  # counting, modulo the vocabulary
    tokens %= 50
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    model.eval()
    expected = model(tokens)
    torch.testing.assert_close(materialize(model)(tokens), expected, rtol=1e-4, atol=1e-5)
