"""Shows captions of pictures side by side: a page to open by a double click, and a contact sheet.

    python recipes/coco_captioning/gallery.py --references TEST.json \\
        --captions baseline=A.json veps=B.json --out DIR

DIR/index.html has a card for each picture, with its references and what each model says, by what
the last model gains in CIDEr over the first. It can be sorted and filtered, needs no network, and
DIR can be moved and sent as a whole. DIR/contact.png has the largest gains and losses. A gallery
that is there already is replaced.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from cards import make_cards
from coco_json import References, read_references, read_results, refuse
from page import GENERATOR, render
from scoring import score_captions
from script import Narrator, check_installed, parser, run_script
from sheet import draw
from stages import UserError, scratch
from thumbnails import thumbnail

NEEDED = {
    **{"numpy": "numpy", "pycocoevalcap": "pycocoevalcap", "PIL": "pillow"},
    **{"matplotlib": "matplotlib", "rich": "rich"},
}
PAGE, SHEET, PICTURES = "index.html", "contact.png", "pictures"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--references", required=True, type=Path, metavar="FILE")
    options.add_argument(
        "--captions", required=True, nargs="+", metavar="NAME=FILE", help="of each model"
    )
    options.add_argument("--out", required=True, type=Path, metavar="DIR")
    options.add_argument(
        "--images", type=Path, metavar="DIR", help="default: what the references name"
    )
    return options.parse_args(arguments)


def models(given: Sequence[str]) -> dict[str, Path]:
    """The files by name. UserError."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not (name.strip() and equals and file):
            raise UserError(f"--captions {text}: give NAME=FILE")
        if name in found:
            raise UserError(f"--captions has the name {name} twice")
        found[name] = Path(file)
    return found


def find_pictures(references: References, images: Path | None) -> dict[int, Path]:
    """The files by id. UserError unless all are there."""
    folder = images or references.folder
    if folder is None:
        raise UserError(f"{references.path} does not say where its pictures are: give --images")
    paths = {picture: folder / file for picture, file in references.files.items()}
    refuse(folder, "missing picture", [path for path in paths.values() if not path.is_file()])
    return paths


def check_out(out: Path) -> None:
    """UserError where something else than a gallery is there."""
    if out.is_dir():
        page = out / PAGE
        if page.is_file() and GENERATOR in page.read_text("utf-8", "replace")[:1000]:
            return
        if not any(out.iterdir()):
            return
    if out.exists():
        raise UserError(f"--out {out} is there and is no gallery; give another")


def write_whole(out: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder of another name, which then takes the place of `out`."""
    with scratch(out.parent, f"{out.name}.partial") as partial:
        fill(partial)
        with scratch(out.parent, f"{out.name}.replaced") as replaced:
            if out.exists():
                os.rename(out, replaced)
            os.rename(partial, out)


def make(args: argparse.Namespace) -> None:
    files, out = models(args.captions), args.out.resolve()
    check_out(out)
    references = read_references(args.references)
    results = [read_results(file, references) for file in files.values()]
    pictures = find_pictures(references, args.images)
    with Narrator("making the gallery") as narrator:

        def fill(folder: Path) -> None:
            (folder / PICTURES).mkdir()
            narrator.say(f"{len(pictures):,} pictures")
            small = {
                picture: thumbnail(path, folder / PICTURES, str(picture))
                for picture, path in pictures.items()
            }
            scores = []
            for name, captions in zip(files, results, strict=True):
                narrator.say(f"scoring {name}")
                scores.append(score_captions(references.captions, captions))
            cards = make_cards(references, results, scores, small)
            narrator.say("page and contact sheet")
            title = f"Captions of {args.references.name}"
            html = render(title, list(files), scores, cards, folder, SHEET)
            (folder / PAGE).write_text(html, "utf-8")
            draw(title, list(files), scores, cards, folder / SHEET)

        write_whole(out, fill)
        narrator.say(f"{out / PAGE}")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)

    def body() -> None:
        check_installed(NEEDED)
        make(args)

    return run_script("gallery.py", body, resumes=False)


if __name__ == "__main__":
    sys.exit(main())
