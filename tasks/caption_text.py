"""How a caption is cut into tokens and put together again: words by the papers' rule, or pieces."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from paramshare import ShareError

_WORD = re.compile(r"[^\W_]+")


def words(caption: str) -> list[str]:
    """Lower case, cut at everything that is neither letter nor digit, punctuation dropped.

    The authors' rule for COCO (ExpansionNet v2); they keep words that occur five times.
    """
    return _WORD.findall(caption.lower())


class CaptionText:
    """Tokens of captions: words, or the pieces of a SentencePiece model.

    pieces: the model, as the bytes of its file; None: words.
    """

    def __init__(self, pieces: bytes | None = None) -> None:
        self.pieces = pieces
        if pieces is not None:
            self._processor.vocab_size()  # a damaged model is to be known at once

    def split(self, caption: str) -> list[str]:
        """The tokens; none where there is nothing but punctuation."""
        plain = words(caption)
        if self.pieces is None:
            return plain
        return self._processor.encode(" ".join(plain), out_type=str)

    def join(self, tokens: list[str]) -> str:
        """The caption, as plain text."""
        return " ".join(tokens) if self.pieces is None else self._processor.decode(tokens)

    @cached_property
    def _processor(self) -> Any:
        try:
            import sentencepiece
        except ImportError:
            raise ShareError(
                "captions in pieces need sentencepiece: pip install sentencepiece"
            ) from None
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=self.pieces)
        except RuntimeError as error:
            raise ShareError(f"this is no SentencePiece model: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {"pieces": self.pieces}  # workers load the model again
