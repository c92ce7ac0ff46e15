from __future__ import annotations

from pathlib import Path

import pytest
from commands import python

import paramshare


def test_version() -> None:
    assert (
        python("-m", "paramshare.cli", "--version").stdout
        == f"paramshare {paramshare.__version__}\n"
    )


def test_user_dir_is_alone_in_its_parent() -> None:
    """fairseq puts the parent first on sys.path: anything beside it would become importable."""
    result = python("-m", "paramshare.cli", "user-dir")
    assert result.returncode == 0
    folder = Path(result.stdout.removesuffix("\n"))
    assert (folder / "__init__.py").exists()
    others = {p.name for p in folder.parent.iterdir()} - {"__pycache__"}
    assert others == {folder.name} == {"paramshare_fairseq"}


def test_no_command() -> None:
    result = python("-m", "paramshare.cli")
    assert result.returncode == 2
    assert "user-dir" in result.stderr


def test_the_core_imports_neither_fairseq_nor_the_extras() -> None:
    code = (
        "import sys, paramshare, paramshare.cli, paramshare.models\n"
        "print([m for m in ('fairseq', 'transformers', 'matplotlib', 'sacrebleu') "
        "if m in sys.modules])"
    )
    result = python("-c", code)
    assert result.stdout == "[]\n", result.stderr


def test_tasks_without_fairseq_say_what_to_install() -> None:
    code = "import sys; sys.modules['fairseq'] = None; import paramshare.tasks"
    result = python("-c", code)
    assert result.returncode == 1
    assert "pip install 'paramshare[fairseq]'" in result.stderr


@pytest.mark.parametrize("name", ["paramshare", "models", "tasks"])
def test_every_module_says_what_it_is(name: str) -> None:
    root = Path(paramshare.__file__).parents[1] / name
    files = sorted(root.rglob("*.py"))
    assert files
    for file in files:
        assert file.read_text("utf8").startswith('"""'), file
