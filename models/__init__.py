"""Models that the library brings along."""

from paramshare.models.transformer_lm import TransformerLM

__all__ = ["TransformerLM"]
