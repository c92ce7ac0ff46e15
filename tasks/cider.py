"""CIDEr-D, as a reward: with the document frequencies of a corpus, not of what is scored.

pycocoevalcap counts the frequencies in the references that it is given, so it cannot score a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import exp, log, sqrt

Tokens = Sequence[Hashable]
LONGEST, SIGMA = 4, 6.0  # n-grams; of the penalty of lengths
Vector = tuple[list[dict[Tokens, float]], list[float], int]


class CiderD:
    """CIDEr-D (Vedantam et al., https://arxiv.org/abs/1411.5726, section 3 and equation 6) of
    captions, against references of pictures; 10 is the most.

    references: of all pictures of the corpus, each a list of token sequences.
    """

    def __init__(self, references: Iterable[Sequence[Tokens]]) -> None:
        self.frequency: Counter[Tokens] = Counter()
        pictures = 0
        for captions in references:
            self.frequency.update({gram for caption in captions for gram in _grams(caption)})
            pictures += 1
        self.log_pictures = log(max(pictures, 1))

    def vector(self, caption: Tokens) -> Vector:
        """What a caption is compared by; to be kept where it is compared often."""
        weights: list[dict[Tokens, float]] = [{} for _ in range(LONGEST)]
        norms = [0.0] * LONGEST
        for gram, count in _grams(caption).items():
            weight = count * (self.log_pictures - log(max(1, self.frequency[gram])))
            weights[len(gram) - 1][gram] = weight
            norms[len(gram) - 1] += weight**2
        # The scorers of COCO call the number of bigrams the length.
        return weights, [sqrt(norm) for norm in norms], max(len(caption) - 1, 0)

    def score(self, caption: Tokens, references: Sequence[Vector]) -> float:
        """The mean over references and n."""
        weights, norms, length = self.vector(caption)
        total = 0.0
        for others, other_norms, other_length in references:
            near = exp(-((length - other_length) ** 2) / (2 * SIGMA**2))
            for n in range(LONGEST):
                if norms[n] and other_norms[n]:
                    product = sum(
                        min(weight, others[n].get(gram, 0.0)) * others[n].get(gram, 0.0)
                        for gram, weight in weights[n].items()
                    )
                    total += near * product / (norms[n] * other_norms[n])
        return 10 * total / LONGEST / len(references)


def _grams(caption: Tokens) -> Counter[Tokens]:
    caption = tuple(caption)
    return Counter(
        caption[start : start + n]
        for n in range(1, LONGEST + 1)
        for start in range(len(caption) - n + 1)
    )
