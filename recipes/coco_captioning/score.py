"""Scores captions of pictures: BLEU, ROUGE-L, CIDEr, and by Java METEOR and SPICE.

    python recipes/coco_captioning/score.py RESULTS.json [RESULTS.json ...] --references TEST.json

RESULTS.json is a list of image_id and caption, for all pictures of the references. CIDEr weighs
words by the references that are given, so its values are those of papers only on the whole split.
Captions are cut by PTB's rules, as in papers, if Java is installed; otherwise at everything that is
neither letter nor digit. Those scores are not comparable with each other; the output says which
they are, and what is left out: METEOR without Java, and SPICE without its models, which are never
downloaded here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from coco_json import read_references, read_results
from scoring import Scores, score_captions
from script import Narrator, check_installed, parser, run_script
from stages import UserError

NEEDED = {"numpy": "numpy", "pycocoevalcap": "pycocoevalcap", "rich": "rich"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    options.add_argument("--references", required=True, type=Path, metavar="FILE")
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything here, with CIDEr by picture"
    )
    return options.parse_args(arguments)


def score(args: argparse.Namespace) -> None:
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise UserError(f"--json {args.json}: give a file in a folder that is there")
    paths = list(dict.fromkeys(args.results))
    references = read_references(args.references)
    results = {path: read_results(path, references) for path in paths}  # all, before the minutes
    scores: dict[Path, Scores] = {}
    with Narrator("scoring") as narrator:
        for path, captions in results.items():
            narrator.say(f"{path}: {len(captions):,} captions")
            scores[path] = score_captions(references.captions, captions)
    show(paths, list(scores.values()))
    if args.json:
        part = args.json.with_name(f".{args.json.name}.part")
        found = {str(path): asdict(found) for path, found in scores.items()}
        part.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        part.replace(args.json)


def show(paths: Sequence[Path], scores: Sequence[Scores]) -> None:
    """The table, and below it what one must know to compare it."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    rows = [["", *names]]
    for scorer in dict.fromkeys(name for found in scores for name in found.table):
        values = (found.table.get(scorer) for found in scores)
        rows.append([scorer, *("-" if x is None else f"{x:.1f}" for x in values)])
    rows.append(["empty captions", *(f"{found.empty:,}" for found in scores)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
    print(f"pictures: {len(scores[0].cider):,}")
    print(f"tokens: {scores[0].tokenisation}")
    reasons = [item for found in scores for item in found.left_out.items()]
    for scorer, reason in dict.fromkeys(reasons):
        print(f"left out: {scorer}: {reason}")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed(NEEDED)
        score(args)

    return run_script("score.py", body, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
