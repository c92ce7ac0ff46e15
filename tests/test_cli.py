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


COMMAND = """
import sys
sys.modules[sys.argv[1]] = None  # as if it were not installed
from paramshare.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("absent", "command", "extra"),
    [
        ("transformers", ["import-sharebert", "in", "out"], "transformers"),
        ("transformers", ["export-sharebert", "in.pt", "out"], "transformers"),
        ("transformers.quantizers", ["import-sharebert", "in", "out"], "transformers"),
        ("fairseq", ["user-dir"], "fairseq"),
        ("fairseq", ["caption", __file__, "--model", "in"], "fairseq"),
        ("omegaconf", ["caption", __file__, "--model", "in"], "fairseq"),
    ],
)
def test_commands_without_their_extra_say_what_to_install(
    absent: str, command: list[str], extra: str
) -> None:
    result = python("-c", COMMAND, absent, *command)
    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"paramshare {command[0]}: ")
    assert f": pip install 'paramshare[{extra}]'" in line
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("absent", "module", "extra"),
    [
        ("transformers", "pretrained", "transformers"),
        ("transformers", "sharebert_pretrained", "transformers"),
        ("transformers", "sharebert_released", "transformers"),
        ("transformers", "sharebert_fairseq", "transformers"),
        ("fairseq", "captioner", "fairseq"),
    ],
)
def test_models_without_their_extra_say_what_to_install(
    absent: str, module: str, extra: str
) -> None:
    result = python(
        "-c", f"import sys; sys.modules[{absent!r}] = None; import paramshare.models.{module}"
    )
    assert result.returncode == 1
    assert f": pip install 'paramshare[{extra}]'" in result.stderr.splitlines()[-1]


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
