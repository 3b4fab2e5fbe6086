"""The package as a whole: its public surface, and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import refusion

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_public_surface() -> None:
    assert sorted(refusion.__all__) == [
        "AutoregressiveConfig", "DecodeConfig", "Model", "Result", "Stats", "UserError", "__version__", "load",
    ]  # fmt: skip
    for name in refusion.__all__:
        assert getattr(refusion, name) is not None
    with pytest.raises(AttributeError, match="lod"):
        _ = refusion.lod


def test_version_is_that_of_the_package() -> None:
    assert PROJECT["project"]["version"] == refusion.__version__


def test_importing_does_not_import_torch() -> None:
    code = "import sys, refusion, refusion.cli; print(*{'torch', 'numpy', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_the_command_starts_where_an_interrupt_is_answered() -> None:
    """`refusion.__main__` imports nothing that takes time before it can answer Ctrl-C."""
    assert PROJECT["project"]["scripts"] == {"refusion": "refusion.__main__:run"}
    code = "import sys, refusion.__main__; print(*{'cyclopts', 'rich', 'refusion.cli'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_types_are_shipped() -> None:
    assert (Path(refusion.__file__).parent / "py.typed").exists()


def test_constraints_fit_the_requirements() -> None:
    assert (ROOT / "constraints.txt").read_text(encoding="utf-8").split() == ["torch==2.13.0"]
    assert "torch>=2.6" in PROJECT["project"]["dependencies"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_functions_are_short_and_modules_say_what_they_are(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name
    assert ast.get_docstring(tree) or not tree.body
