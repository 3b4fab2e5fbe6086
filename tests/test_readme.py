"""The README tells the truth: its Python runs, its commands and files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from refusion import cli
from refusion.models.checkpoint import packaged_models

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^    (refusion .*)$", README, re.M)]

needs_nano = pytest.mark.skipif("nano" not in packaged_models(), reason="the package is without its model")


@needs_nano
def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert "forwards" in capsys.readouterr().out


@needs_nano
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] in ("generate", "examples", "info")])
def test_quick_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip()


def test_every_command_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) >= 5
    for command in COMMANDS:
        assert cli.main([command.split()[1], "--help"]) == 0
        text = capsys.readouterr().out
        for flag in re.findall(r"--[a-z-]+", command):
            assert flag in text, command


def test_files_and_folders_in_the_tree_exist() -> None:
    tree = README.split("## What is where")[1].split("##")[0]
    for name in re.findall(r"[\w./-]+\.(?:py|md|toml)\b", tree):
        assert list(ROOT.rglob(name)), name
    for name in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        assert (ROOT / name).exists(), name


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^    make (\S+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_recipe_key_is_explained() -> None:
    from dataclasses import fields

    from refusion.training import recipe

    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    for section in (recipe.DataRecipe, recipe.ModelRecipe, recipe.ObjectiveRecipe, recipe.TrainingRecipe, recipe.ValidationRecipe):
        for entry in fields(section):
            assert f"`{entry.name}`" in text or f".{entry.name}`" in text, entry.name
