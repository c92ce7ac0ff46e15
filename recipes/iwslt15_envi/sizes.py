"""Prints what the models of train.py store, and whether EPS finds its columns.

    python recipes/iwslt15_envi/sizes.py                     # with the recipe's dictionary
    python recipes/iwslt15_envi/sizes.py --types 16000       # prepare.py --vocab-size 16000

EPS reads the table itself: as many weights fit as it has numbers. So a larger dictionary, or
narrower layers, make it fit.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from building import build
from quiet import import_tasks
from results import markdown
from script import check_installed, parser, run_script
from stages import write_lines
from train import SIZES, command

TYPES, SPECIALS = 4000, 4  # of prepare.py; <s>, <pad>, </s>, <unk>


def count(arch: str, model: str, size: str, data: Path, extra: tuple[str, ...] = ()) -> int:
    """Numbers that a model stores; `data` has its dictionaries. Raises ShareError."""
    from paramshare.report import count_parameters

    _, made = build(command(arch, model, size, data, data, extra=extra)[3:])
    return count_parameters(made)


def missing(arch: str, size: str, data: Path, extra: tuple[str, ...] = ()) -> str | None:
    """What EPS lacks: "needs 132 columns, the table has 128: 4 are missing"; None if it fits."""
    from paramshare import ShareError

    try:
        count(arch, "eps", size, data, extra)
    except ShareError as error:
        found = re.search(r"needs \d+ columns, the table has \d+: \d+ are missing", str(error))
        if found is None:
            raise
        return found[0]
    return None


def make_dictionaries(folder: Path, types: int) -> None:
    """Of so many entries, with fairseq's specials."""
    for language in ("en", "vi"):
        lines = [f"w{n} 1" for n in range(types - SPECIALS)]
        write_lines(folder / f"dict.{language}.txt", lines)


def table(types: int) -> str:
    """In Markdown, a line a size."""
    head = ["architecture", "size", "stored, plain", "VEPS", "EPS"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        make_dictionaries(data, types)
        for arch, sizes in SIZES.items():
            for size in sizes:
                plain, veps = (count(arch, model, size, data) for model in ("baseline", "veps"))
                eps = missing(arch, size, data) or f"{count(arch, 'eps', size, data):,}"
                rows.append([arch, f"`{size}`", f"{plain:,}", f"{veps:,}", eps])
    return markdown(head, rows)


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument(
        "--types", type=int, default=TYPES, metavar="N", help="of the dictionary (%(default)s)"
    )
    args = options.parse_args(arguments)

    def body() -> None:
        check_installed({"fairseq": "fairseq-fixed"})
        import_tasks()
        print(table(args.types))

    return run_script("sizes.py", body)


if __name__ == "__main__":
    sys.exit(main())
