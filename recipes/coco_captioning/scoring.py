"""The scores of captions, as COCO's evaluation takes them, scorer by scorer.

BLEU-1 to 4, ROUGE-L and CIDEr (its variant D) are pycocoevalcap's, in Python. PTB's tokens, METEOR
and SPICE need Java. Scores of different tokens are not comparable, so a process uses one rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import java
from coco_json import check_pictures, refuse
from stages import UserError

ORDER = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
PTB = "PTB (Java), as in papers"
PLAIN = "paramshare.tasks.caption_text.words, as there is no Java: not comparable with papers"


@dataclass
class Scores:
    """100 times what pycocoevalcap says, as in papers: 100 is the most, of CIDEr 1000.

    table: by scorer. cider: of each picture; their mean is in the table. tokenisation: PTB or
    PLAIN. empty: captions without a token. left_out: scorers, and why.
    """

    table: dict[str, float]
    cider: dict[int, float]
    tokenisation: str
    empty: int
    left_out: dict[str, str]


def score_captions(references: Mapping[int, Sequence[str]], results: Mapping[int, str]) -> Scores:
    """All scores that can be had, of captions by picture, whatever the order of either.

    Raises UserError where the two are not of the same pictures, two at least, where a reference has
    no token, and where PTB fails. METEOR or SPICE that fail are left out.
    """
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    check_pictures(references, results, "the references", "the results")
    # Sums of floats depend on the order.
    true = _tokens({picture: sorted(references[picture]) for picture in sorted(references)})
    said = _tokens({picture: [results[picture]] for picture in true})
    wordless = [picture for picture, texts in true.items() if not texts or not all(texts)]
    refuse("the references", "picture with a reference that has no word", wordless)

    bleu, _ = Bleu(4).compute_score(true, said, verbose=0)
    cider, ciders = Cider().compute_score(true, said)
    found = {f"BLEU-{n}": score for n, score in enumerate(bleu, 1)}
    found |= {"ROUGE-L": Rouge().compute_score(true, said)[0], "CIDEr": cider}
    left_out = {}
    for name, scorer, reason in (
        ("METEOR", java.meteor, java.missing()),
        ("SPICE", java.spice, java.missing() or java.spice_missing()),
    ):
        try:
            if reason:
                raise java.JavaFailed(reason)
            found[name] = scorer(true, said)
        except java.JavaFailed as error:
            left_out[name] = str(error)
    return Scores(
        {name: 100 * float(found[name]) for name in ORDER if name in found},
        {picture: 100 * float(score) for picture, score in zip(true, ciders, strict=True)},
        PLAIN if java.missing() else PTB,
        sum(not text for (text,) in said.values()),
        left_out,
    )


def _tokens(captions: dict[int, list[str]]) -> dict[int, list[str]]:
    """Separated by spaces, as the scorers want them."""
    texts = [text for found in captions.values() for text in found]
    if java.missing():
        try:
            from paramshare.tasks.caption_text import words
        except ImportError as error:
            raise UserError(f"without Java captions are cut by paramshare.tasks: {error}") from None
        lines = iter([" ".join(words(text)) for text in texts])
    else:
        try:
            lines = iter(java.tokenise(texts))
        except java.JavaFailed as error:
            raise UserError(f"PTB, which cuts the captions into tokens, failed: {error}") from None
    return {picture: [next(lines) for _ in found] for picture, found in captions.items()}
