"""Misuse: one line that names the setting or the file, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refusion.cli import main

RECIPE = '[objective]\nmethod = "refusion"\n[training]\nmax_steps = 1\n'


class Folder:
    """Broken model folders and recipes, made from a good one when asked for."""

    def __init__(self, good: Path, temporary: Path) -> None:
        self.good, self.temporary = good, temporary

    def copy(self) -> Path:
        path = self.temporary / "model"
        shutil.copytree(self.good, path)
        for file in (path, *path.iterdir()):
            file.chmod(0o755)
        return path

    def empty(self) -> str:
        path = self.temporary / "empty"
        path.mkdir()
        return str(path)

    def file(self) -> str:
        path = self.temporary / "file"
        path.touch()
        return str(path)

    def broken_config(self) -> str:
        path = self.copy()
        (path / "config.json").write_text("{", encoding="utf-8")
        return str(path)

    def cut_weights(self) -> str:
        path = self.copy()
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
        return str(path)

    def no_weights(self) -> str:
        path = self.copy()
        (path / "model.safetensors").unlink()
        return str(path)

    def no_tokenizer(self) -> str:
        path = self.copy()
        (path / "tokenizer.json").unlink()
        return str(path)

    def other_shape(self) -> str:
        path = self.copy()
        self._edit(path / "config.json", intermediate_size=640)
        return str(path)

    def no_mask(self) -> str:
        path = self.copy()
        self._edit(path / "config.json", mask_token_id=None)
        self._edit(path / "tokenizer_config.json", mask_token=None)
        return str(path)

    @staticmethod
    def _edit(path: Path, **values: object) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")

    def recipe(self, text: str = RECIPE) -> str:
        path = self.temporary / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)


def generate(*options: str, model: str = "{good}", prompt: str = "Max has 20 eggs.") -> list[str]:
    return ["generate", prompt, "--model", model, *options]


# What is typed, and what the one line of complaint must name. {name} stands for what `Folder.name()` makes.
MISUSES = {
    "missing folder": (generate(model="/no/such/folder"), "/no/such/folder"),
    "a file for a folder": (generate(model="{file}"), "is a file"),
    "empty folder": (generate(model="{empty}"), "config.json"),
    "broken config": (generate(model="{broken_config}"), "config.json"),
    "weights cut short": (generate(model="{cut_weights}"), "model.safetensors"),
    "no weights": (generate(model="{no_weights}"), "weights"),
    "no tokenizer": (generate(model="{no_tokenizer}"), "tokenizer"),
    "shapes that do not fit": (generate(model="{other_shape}"), "mlp"),
    "no mask token": (generate("--method", "refusion", model="{no_mask}"), "mask token"),
    "slot threshold above 1": (generate("--slot-threshold", "1.5"), "slot_threshold"),
    "slot threshold below 0": (generate("--slot-threshold", "-0.1"), "slot_threshold"),
    "token threshold above 1": (generate("--token-threshold", "2"), "token_threshold"),
    "threshold not a number": (generate("--token-threshold", "nan"), "token_threshold"),
    "slot size 0": (generate("--slot-size", "0"), "slot_size"),
    "block smaller than slot": (generate("--slot-size", "8", "--block-size", "4"), "block_size"),
    "no room for a token": (generate("--max-new-tokens", "0"), "max_new_tokens"),
    "negative temperature": (generate("--temperature", "-1"), "temperature"),
    "top-p 0": (generate("--top-p", "0"), "top_p"),
    "negative top-k": (generate("--top-k", "-2"), "top_k"),
    "negative seed": (generate("--seed", "-1"), "seed"),
    "empty stop string": (generate("--stop", ""), "stop"),
    "empty prompt": (generate(prompt=""), "prompt"),
    "prompt longer than the context": (generate(prompt="eggs " * 600), "context"),
    "more tokens than the context": (generate("--max-new-tokens", "600"), "max_new_tokens"),
    "unknown number type": (generate("--dtype", "int3"), "--dtype"),
    "unknown device": (generate("--device", "abacus"), "abacus"),
    "no threads": (generate("--threads", "0"), "--threads"),
    "trace that cannot be written": (generate("--trace", "/no/such/folder/t.jsonl"), "--trace"),
    "negative delay": (generate("--live", "--live-delay", "-1"), "--live-delay"),
    "two ways of output": (generate("--compare", "--json"), "--compare"),
    "no prompt": (["generate"], "PROMPT"),
    "prompt without quotes": (["generate", "Max", "has", "eggs"], "quotes"),
    "misspelt option": (generate("--slto-size", "4"), "--slot-size"),
    "not a number": (generate("--slot-size", "four"), "--slot-size"),
    "half a token a slot": (generate("--slot-size", "4.5"), "--slot-size: must be a whole number, got '4.5'"),
    "half a token a block": (generate("--block-size=32.5"), "--block-size"),
    "half a token": (generate("--max-new-tokens", "7.9"), "--max-new-tokens"),
    "half a candidate": (generate("--top-k", "0.5"), "--top-k"),
    "seed with a fraction": (generate("--seed", "0.0"), "--seed"),
    "half a thread": (generate("--threads", "1.5"), "--threads"),
    "a number as rich markup": (generate("--threads", "[red]"), "'[red]'"),
    "threads without number": (generate("--threads", "1e400"), "--threads"),
    "more threads than there are": (generate("--threads", "1" + "0" * 30), "--threads"),
    "digits without end": (generate("--slot-size", "1" * 5000), "--slot-size"),
    "misspelt command": (["genrate", "x"], "generate"),
    "unknown suite": (["eval", "--model", "{good}", "--suite", "nanno"], "nano"),
    "unknown split": (["eval", "--model", "{good}", "--split", "tset"], "'test'"),
    "no tasks": (["eval", "--model", "{good}", "--limit", "0"], "limit"),
    "half a task": (["eval", "--model", "{good}", "--limit", "2.5"], "--limit"),
    "half an example": (["examples", "--count", "1.5"], "--count"),
    "half a seed of examples": (["examples", "--seed", "0.5"], "--seed"),
    "examples without end": (["examples", "--count", "1" + "0" * 30], "--count"),
    "unknown family": (["examples", "--family", "sudok"], "'sudoku'"),
    "no examples": (["examples", "--count", "0"], "--count"),
    "info of nothing": (["info", "/no/such/folder"], "/no/such/folder"),
    "missing recipe": (["train", "/no/such/recipe.toml"], "/no/such/recipe.toml"),
    "recipe is no TOML": (["train", "{recipe:name = }"], "recipe.toml"),
    "missing recipe key": (["train", '{recipe:[objective]\nmethod = "refusion"\n[training]}'], "training.max_steps"),
    "misspelt recipe key": (["train", "{recipe:" + RECIPE + "bach_size = 4}"], "'batch_size'"),
    "misspelt recipe section": (["train", "{recipe:" + RECIPE + "[vaildation]}"], "'validation'"),
    "misspelt override": (["train", "{recipe}", "--training.max-stesp", "4"], "'max_steps'"),
    "misspelt section of an override": (["train", "{recipe}", "--trainign.max-steps", "4"], "'training'"),
    "override without a value": (["train", "{recipe}", "--training.max-steps"], "--training.max-steps"),
    "override of the wrong type": (["train", "{recipe}", "--training.max-steps", "many"], "training.max_steps"),
    "misspelt train option": (["train", "{recipe}", "--resmue"], "'resume'"),
    "train on an unknown device": (["train", "{recipe}", "--device", "abacus"], "--device"),
    "plot of nothing": (["plot"], "RUNS"),
    "plot of a missing folder": (["plot", "/no/such/run"], "/no/such/run"),
    "plot of a file": (["plot", "{file}"], "is a file"),
    "plot of a folder that is no run": (["plot", "{empty}"], "metrics.jsonl"),
    "plot of an unknown kind": (["plot", "{empty}", "--out", "plot.jpg"], ".png, .svg or .pdf"),
    "plot over something unknown": (["plot", "{empty}", "--x", "stpes"], "--x"),
    "nothing to resume": (["train", "{recipe}", "--out", "{empty}", "--resume"], "nothing to resume"),
}  # fmt: skip


@pytest.fixture
def filled(trained_folder: Path, tmp_path: Path) -> Callable[[str], str]:
    """Replaces {name} or {name:argument} by what `Folder` makes of it."""
    folder = Folder(trained_folder, tmp_path)

    def fill(word: str) -> str:
        if not (word.startswith("{") and word.endswith("}")):
            return word
        name, _, argument = word[1:-1].partition(":")
        made = getattr(folder, name)
        return str(made(argument) if argument else made() if callable(made) else made)

    return fill


@pytest.mark.parametrize("misuse", MISUSES)
def test_one_line_and_exit_code_2(
    misuse: str, filled: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words, named = MISUSES[misuse]
    assert main(map(filled, words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.endswith("\n") and captured.err.count("\n") == 1
    assert named in captured.err
    assert "Traceback" not in captured.err


def test_standard_input_that_is_empty_or_no_text(trained_folder: Path) -> None:
    command = [sys.executable, "-m", "refusion", "generate", "-", "--model", str(trained_folder), "--device", "cpu"]
    for given in (b"", b"\xff\xfe\x00"):
        done = subprocess.run(command, input=given, capture_output=True, timeout=120, check=False)
        assert done.returncode == 2
        assert done.stdout == b""
        assert done.stderr.startswith(b"error: prompt") and done.stderr.count(b"\n") == 1


def test_a_model_that_has_no_mask_writes_token_by_token(
    filled: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = filled("{no_mask}")
    assert main(["generate", "Max has 20 eggs.", "--model", folder, "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["forwards"] == 4


# --- streams that are closed or take nothing


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell, in which `refusion` is the command."""
    line = f"refusion() {{ {shlex.quote(sys.executable)} -m refusion \"$@\"; }}; {line}"
    return subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=120, check=False)


POSIX = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")


@POSIX
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    done = shell(f"refusion examples --family list {closed}")
    assert done.returncode == 0 and done.stderr == ""
    assert (done.stdout == "") == (">&-" in closed.replace("2>&-", ""))


@POSIX
def test_complaints_that_nobody_hears_have_their_exit_code() -> None:
    assert shell("refusion examples --count 0 2>&-").returncode == 2
    done = shell("refusion generate - --model /no/such/folder <&-")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@POSIX
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_output_that_is_full_is_one_line(trained_folder: Path) -> None:
    done = shell("refusion examples > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: [Errno 28] No space left on device\n"
    assert shell("refusion examples --count 0 2> /dev/full").returncode == 2
    done = shell(f"refusion generate 'Max has 20 eggs.' --model {trained_folder} --trace /dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: --trace /dev/full: cannot be written (No space left on device)\n"


def test_memory_that_is_spent_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(error: Exception) -> Callable[..., None]:
        def load(*_: object) -> None:
            raise error

        return load

    cpu = "[enforce fail at alloc_cpu.cpp:1] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    for error in (MemoryError(), RuntimeError("CUDA out of memory.\nTried to allocate"), RuntimeError(cpu)):
        monkeypatch.setattr("refusion.cli._load", raising(error))
        assert main(["generate", "x"]) == 2
        complaint = capsys.readouterr().err
        assert complaint.startswith("error: out of memory") and complaint.count("\n") == 1
    monkeypatch.setattr("refusion.cli._load", raising(RuntimeError("a fault of ours")))
    with pytest.raises(RuntimeError, match="ours"):
        main(["generate", "x"])
