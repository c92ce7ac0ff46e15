"""recipes/coco_captioning/README.md shows what its committed lines say."""

from __future__ import annotations

import argparse
import json

import pytest
from loading import RECIPES, within

pytest.importorskip("fairseq", reason="fairseq is not installed")
pytest.importorskip("pycocoevalcap", reason="pycocoevalcap is not installed")

RECIPE = RECIPES / "coco_captioning"


def test_the_table_is_made_of_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (RECIPE / "results.jsonl").read_text("utf8").splitlines()
    (data,) = {json.loads(line)["data"] for line in lines}
    with within("coco_captioning"):
        import compare
        import report
        import train

        monkeypatch.setattr(compare, "captions_digest", lambda folder: data)
        args = argparse.Namespace(
            data=RECIPE, results=RECIPE, archs=list(train.SIZES), epochs=None, seeds=compare.SEEDS
        )
        comparison = compare.Comparison(args)
        chosen = comparison.chosen()
        table = report.table(chosen, comparison.nearest())
    assert [len(rows) for rows in chosen.values()] == [compare.SEEDS] * 12
    readme = (RECIPE / "README.md").read_text("utf8")
    assert f"\n{table}\n" in readme
