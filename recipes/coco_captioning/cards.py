"""What the gallery shows of each picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coco_json import References
from scoring import Scores


@dataclass
class Card:
    """captions and cider (times 100): of each model, in the order of the command line. small: the
    picture's copy."""

    picture: int
    file: str
    small: Path
    references: list[str]
    captions: list[str]
    cider: list[float]

    @property
    def gain(self) -> float:
        """Of the last model over the first, as their shown values say; of a single one, its own."""
        first = self.cider[0] if len(self.cider) > 1 else 0.0
        return round(round(self.cider[-1], 1) - round(first, 1), 1)


def make_cards(
    references: References,
    results: Sequence[Mapping[int, str]],
    scores: Sequence[Scores],
    small: Mapping[int, Path],
) -> list[Card]:
    """The largest gain first."""
    cards = [
        Card(
            picture,
            file,
            small[picture],
            references.captions[picture],
            [captions[picture] for captions in results],
            [found.cider[picture] for found in scores],
        )
        for picture, file in references.files.items()
    ]
    return sorted(cards, key=lambda card: (-card.gain, card.picture))
