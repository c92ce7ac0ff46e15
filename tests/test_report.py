from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from zoo import batch, build

from paramshare import ShareError, flops, share_from_embedding


def test_one_line_a_group_then_the_totals() -> None:
    module = build("Encoder")
    dense = sum(p.numel() for p in module.parameters())
    sharing = share_from_embedding(module, module.embedding)
    stored = sum(p.numel() for p in module.parameters())
    lines = str(sharing).splitlines()
    assert " ".join(lines[0].split()) == ("weight uses shape layout columns used wasted execution")
    assert " ".join(lines[1].split()) == (
        "encoder.layers.*.self_attn.in_proj_weight 3x 48 x 16 aligned/3 0-15 768 192 materialized"
    )
    assert len(lines) == 1 + 4 + 3
    assert lines[5] == (
        "38 of 38 columns read from virtual table 60 x 38 = table embedding (60 x 16) @ "
        "projection (16 x 38)"
    )
    ratio = f"{dense / stored:.2f}"
    operations = 3 * (48 * 16 + 16 * 16 + 24 * 16 + 16 * 24)
    assert lines[6] == (
        f"multiply-adds a token {operations:,}   dense {operations:,}   ratio 1.00; "
        f"{38 * 48 * 16:,} once for materialized weights (in training once a call)"
    )
    assert lines[7] == f"stored {stored:,}   dense {dense:,}   compression {ratio}x"


def test_says_what_whitening_takes() -> None:
    """The moments of 48 rows of 16 features, and a product with 38 columns."""
    module = build("Encoder")
    once = 38 * 48 * 16 + 16 * 16 * (48 + 38)
    said = str(share_from_embedding(module, module.embedding, whiten=True))
    assert f"{once:,} once for materialized weights (in training once a call)" in said
    module = build("Narrow")
    said = str(share_from_embedding(module, module.embedding, whiten=True))
    assert "once for whitening (in training once a call)" in said


def test_says_which_weights_run_factored_and_which_fell_back() -> None:
    module = build("Narrow")
    assert str(share_from_embedding(module, module.embedding)).count("factored") == 5
    from test_plan import Bag, every_linear

    module = Bag(10, 4, [(3, 11), (3, 4)])
    text = str(share_from_embedding(module, module.embedding, select=every_linear))
    assert "cannot be aligned: column layout" in text
    assert "layout" in text


def number(pattern: str, line: str) -> int:
    return int(re.search(pattern, line)[1].replace(",", ""))


@pytest.mark.parametrize("execution", ["factored", "blockwise"])
def test_multiply_adds_are_those_that_run(execution: str) -> None:
    module = build("Narrow")
    sharing = share_from_embedding(module, module.embedding, execution=execution)
    tokens = batch()[0]
    found = flops(module, tokens)  # says which weights are given one input, too
    line = str(sharing).splitlines()[-2]
    a_token = number(r"multiply-adds a token ([\d,]+)", line)
    a_call = number(r"; ([\d,]+) a call", line) if execution == "blockwise" else 0
    assert sum(found.weights.values()) == 2 * (a_token * tokens.numel() + a_call)


def test_eps_counts_its_constants() -> None:
    module = build("Chain")
    sharing = share_from_embedding(module, module.embedding, virtual=False)
    assert sharing.stored_parameters == sum(p.numel() for p in module.parameters()) + 1
    assert "columns read from table 0 (60 x 16)" in str(sharing)


def test_plan_is_json() -> None:
    module = build("Encoder")
    sharing = share_from_embedding(module, module.embedding)
    plan = json.loads(json.dumps(sharing.plan.to_dict()))
    assert plan["groups"][0]["slots"] == [
        f"encoder.layers.{i}.self_attn.in_proj_weight" for i in range(3)
    ]
    assert plan["columns"] == 38


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot(tmp_path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    module = build("Encoder")
    path = tmp_path / f"columns.{ending}"
    share_from_embedding(module, module.embedding).plot(path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(content) > 5000
    assert list(tmp_path.iterdir()) == [path]


def test_plot_shows_the_parts_of_what_is_stored(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    module = build("Encoder")
    sharing = share_from_embedding(module, module.embedding)
    sharing.plot(tmp_path / "columns.svg")
    text = (tmp_path / "columns.svg").read_text("utf8")
    rest = sharing.stored_parameters - 60 * 16 - 16 * 38
    for label in ("table 960", "projection 608", f"not shared {rest:,}"):
        assert f"<!-- {label} -->" in text
    assert f"<!-- dense {sharing.dense_parameters:,} -->" in text


def test_plot_of_an_unknown_kind(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    module = build("Encoder")
    sharing = share_from_embedding(module, module.embedding)
    with pytest.raises(ShareError, match=r"columns.doc: matplotlib writes no .doc"):
        sharing.plot(tmp_path / "columns.doc")
    assert list(tmp_path.iterdir()) == []


def test_plot_that_cannot_be_written(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    module = build("Encoder")
    sharing = share_from_embedding(module, module.embedding)
    (tmp_path / "columns.png").mkdir()
    for path in ("columns.png", "nowhere/columns.png"):
        with pytest.raises(ShareError, match="columns.png cannot be written"):
            sharing.plot(tmp_path / path)
    assert [path.name for path in tmp_path.iterdir()] == ["columns.png"]


def test_plot_without_matplotlib(tmp_path, monkeypatch) -> None:
    module = build("Encoder")
    sharing = share_from_embedding(module, module.embedding)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ShareError, match=r"pip install 'paramshare\[plot\]'"):
        sharing.plot(tmp_path / "columns.png")


def test_it_names_what_is_not_finite() -> None:
    """One such row of the table makes every output NaN, and nothing else says why."""
    module = build("Encoder")
    sharing = share_from_embedding(module, module.embedding)
    assert "not finite" not in str(sharing)
    with torch.no_grad():
        module.embedding.weight[[5, 9], 3] = float("nan")
    assert not module(batch()[0]).isfinite().any()
    assert "not finite: rows 5, 9 of embedding, and all that reads there" in str(sharing)
    with torch.no_grad():
        module.embedding.weight[[5, 9]] = 0.1
        module.paramshare.projection[0, 0] = float("inf")
    assert "not finite: the projection, and all weights that read it" in str(sharing)
