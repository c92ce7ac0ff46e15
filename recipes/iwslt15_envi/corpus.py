"""Fills the folder `raw`: {train,dev,test}.{en,vi}, plain text, one sentence a line."""

import collections
from pathlib import Path

import clean
import debian_corpus
import iwslt15
from clean import Pair
from stages import Say, write_lines


def from_debian(folder: Path, cache: Path, say: Say) -> dict[str, object]:
    """The corpus out of Debian's packages. Figures: `sources`, `dropped`, `missing`, `pairs`."""
    found, missing = debian_corpus.raw_pairs(cache, say)
    held_out = {source.name for source in debian_corpus.SOURCES if source.held_out}
    splits: dict[str, list[Pair]] = {"train": [], "dev": [], "test": []}
    dropped = dict.fromkeys(clean.REASONS, 0)
    sources = {}
    seen: set[str] = set()
    for name, raw in found.items():
        figures = collections.Counter(found=len(raw), sentences=0, kept=0)
        for page, en, vi in raw:
            split = clean.split_of(f"{name}/{page}") if name in held_out else "train"
            for pair in clean.sentence_pairs(en, vi):
                figures["sentences"] += 1
                verdict = clean.judge(pair)
                if not isinstance(verdict, str) and clean.duplicate_key(verdict) in seen:
                    verdict = clean.DUPLICATE
                if isinstance(verdict, str):
                    dropped[verdict] += 1
                    continue
                seen.add(clean.duplicate_key(verdict))
                splits[split].append(verdict)
                figures["kept"] += 1
        sources[name] = dict(figures)
    _write(folder, splits)
    return {"sources": sources, "dropped": dropped, "missing": missing, "pairs": _sizes(splits)}


def from_iwslt15(folder: Path, data: Path) -> dict[str, object]:
    """The IWSLT15 files as plain text. Figures: `dropped`, `pairs`.

    Dev and test keep every line; training pairs with an empty side are dropped.
    """
    splits = iwslt15.read(data)
    train = splits["train"]
    splits["train"] = [pair for pair in train if pair.en and pair.vi]
    _write(folder, splits)
    dropped = {"one side is empty": len(train) - len(splits["train"])}
    return {"dropped": dropped, "pairs": _sizes(splits)}


def _write(folder: Path, splits: dict[str, list[Pair]]) -> None:
    for split, pairs in splits.items():
        write_lines(folder / f"{split}.en", [pair.en for pair in pairs])
        write_lines(folder / f"{split}.vi", [pair.vi for pair in pairs])


def _sizes(splits: dict[str, list[Pair]]) -> dict[str, dict[str, int]]:
    return {
        split: {
            "pairs": len(pairs),
            "en_words": sum(len(pair.en.split()) for pair in pairs),
            "vi_words": sum(len(pair.vi.split()) for pair in pairs),
        }
        for split, pairs in splits.items()
    }
