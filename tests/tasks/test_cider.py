"""CIDEr-D as a reward, against the scorer of COCO."""

import random

import numpy as np
import pytest

pytest.importorskip("fairseq", reason="needs the fairseq extra")
pytest.importorskip("pycocoevalcap", reason="needs the captioning extra")

from pycocoevalcap.cider.cider import Cider

from paramshare.tasks.cider import CiderD

WORDS = ["a", "red", "blue", "circle", "square", "on", "the", "left", "of", "two", "dogs"]


def made_up(pictures: int) -> tuple[dict[int, list[str]], dict[int, str]]:
    draw = random.Random(pictures)

    def caption() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))

    references = {n: [caption() for _ in range(draw.randint(1, 5))] for n in range(pictures)}
    return references, {n: draw.choice([caption(), *references[n]]) for n in references}


@pytest.mark.parametrize("pictures", [2, 7, 40])
def test_it_is_cider_of_coco(pictures: int) -> None:
    references, captions = made_up(pictures)
    _, theirs = Cider().compute_score(references, {n: [text] for n, text in captions.items()})
    reward = CiderD([[text.split() for text in texts] for texts in references.values()])
    ours = [
        reward.score(captions[n].split(), [reward.vector(text.split()) for text in references[n]])
        for n in references
    ]
    np.testing.assert_allclose(ours, theirs, atol=1e-9)
    assert max(ours) > 1  # some caption is a reference


def test_frequencies_are_those_of_the_corpus() -> None:
    """A word that all pictures have is worth nothing, whatever the batch; the end of a caption is a
    word like others."""
    corpus = [[("a", "dog", 2)], [("a", "cat", 2)], [("a", "red", "car", 2)]]
    reward = CiderD(corpus)
    (dog,) = ([reward.vector(caption) for caption in captions] for captions in corpus[:1])
    assert reward.score(("a",), dog) == 0
    assert reward.score(("a", "dog", 2), dog) > reward.score(("a", "dog"), dog) > 0


def test_empty_caption() -> None:
    reward = CiderD([[(2,)], [(5, 2)]])
    assert reward.score((), [reward.vector((5, 2))]) == 0
