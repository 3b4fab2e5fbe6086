"""The command line: what it prints where, and that it hands on what it was given."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import refusion
from refusion import cli
from refusion.cli import main
from refusion.config import CONFIGS, AutoregressiveConfig, DecodeConfig
from refusion.evaluation.procedural import FAMILIES, take

QUESTION = "Max has 20 eggs. Max buys 11 more eggs. How many eggs does Max have now?"
RESULT_KEYS = {"events", "text", "token_ids", "finish_reason", "stats", "settings", "prompt_ids"}


@pytest.fixture
def generate(trained_folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `refusion generate` on the tiny model; returns stdout and stderr."""

    def run(*options: str, prompt: str = QUESTION) -> tuple[str, str]:
        assert main(["generate", prompt, "--model", str(trained_folder), "--device", "cpu", *options]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


# --- help


@pytest.mark.parametrize("command", ["generate", "eval", "train", "plot", "info", "examples"])
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert command in capsys.readouterr().out
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "For example:" in out
    assert f"refusion {command}" in out.partition("For example:")[2]


def test_every_setting_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {f.name for config in CONFIGS.values() for f in fields(config)}
    assert set(cli.SETTINGS_HELP) == settings
    for command in ("generate", "eval"):
        main([command, "--help"])
        out = capsys.readouterr().out
        assert all(f" --{name.replace('_', '-')} " in out for name in settings)


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "refusion COMMAND --help" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == refusion.__version__


def test_help_is_quick() -> None:
    """CPU time, interpreter included: it does not depend on what else the machine does."""
    code = (
        "import sys, time; from refusion.cli import main; main(['--help'])\n"
        "print(time.process_time(), *{'torch', 'numpy', 'tokenizers'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    seconds, *heavy = done.stderr.split()
    assert not heavy
    assert float(seconds) < 0.5


# --- generate


def test_answer_on_stdout_figures_on_stderr(generate: Any, trained_folder: Path) -> None:
    out, err = generate()
    result = refusion.load(trained_folder, device="cpu").generate(QUESTION)
    assert out == result.text + "\n"
    assert err.count("\n") == 1
    assert f"{result.stats.tokens} tokens in {result.stats.forwards} forwards" in err


def test_json_is_the_result(generate: Any, trained_folder: Path) -> None:
    out, err = generate("--json", "--slot-size", "4", "--max-new-tokens", "40")
    report = json.loads(out)
    config = DecodeConfig(slot_size=4, max_new_tokens=40)
    expected = refusion.load(trained_folder, device="cpu").generate(QUESTION, config).to_dict(events=True)
    assert err == ""
    assert set(report) == RESULT_KEYS
    for timed in ("seconds", "tokens_per_second"):
        assert report["stats"].pop(timed) > 0
        expected["stats"].pop(timed)
    assert report == json.loads(json.dumps(expected))


def test_every_flag_reaches_the_settings(generate: Any) -> None:
    given = {
        "max_new_tokens": 24, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 3, "slot_size": 6, "block_size": 12,
        "slot_threshold": 0.8, "token_threshold": 0.3, "slot_order": "left_to_right", "slot_score": "mean",
    }  # fmt: skip
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    out, err = generate(*flags, "--ignore-eos", "--recompute", "--stop", "xyz", "--stop", "a b", "--json")
    assert json.loads(out)["settings"] == {**given, "ignore_eos": True, "recompute": True, "stop": ["xyz", "a b"]}
    assert set(given) | {"ignore_eos", "recompute", "stop"} == {f.name for f in fields(DecodeConfig)}
    assert err == ""


def test_token_by_token_and_what_it_ignores(generate: Any) -> None:
    out, err = generate("--method", "autoregressive", "--slot-size", "4", "--top-k", "3", "--json")
    report = json.loads(out)
    assert report["stats"]["forwards"] == report["stats"]["tokens"]
    assert set(report["settings"]) == {f.name for f in fields(AutoregressiveConfig)}
    assert err.splitlines()[0].startswith("warning: --slot-size is ignored")
    assert err.splitlines()[1] == "warning: --top-k is ignored at temperature 0"


def test_the_prompt_may_come_from_standard_input(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = generate("--json")
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
    out, _ = generate("--json", prompt="-")
    assert json.loads(out)["prompt_ids"] == json.loads(expected)["prompt_ids"]


def test_raw_leaves_the_template_out(generate: Any, trained_folder: Path) -> None:
    out, _ = generate("--raw", "--json", prompt="Max has 20 eggs.")
    tokenizer = refusion.load(trained_folder, device="cpu").tokenizer
    assert json.loads(out)["prompt_ids"] == tokenizer.encode("Max has 20 eggs.", add_special_tokens=True)


def test_live_without_a_terminal_is_plain_lines(generate: Any) -> None:
    quiet, _ = generate()
    out, err = generate("--live", "--live-delay", "60")
    assert out == quiet
    *lines, last = err.splitlines()
    assert lines and all(line.startswith("round ") for line in lines)
    assert "tokens per forward" in last


def test_compare_prints_both_figures(generate: Any) -> None:
    _, err = generate("--compare")
    slots, tokens = [line for line in err.splitlines() if "forwards:" in line]
    assert slots.startswith("slots:")
    assert tokens.startswith("token by token:")
    assert "1.00 tokens per forward" in tokens


def test_trace_holds_request_events_and_result(generate: Any, tmp_path: Path) -> None:
    out, _ = generate("--json", "--trace", str(tmp_path / "trace.jsonl"))
    report = json.loads(out)
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text(encoding="utf-8").splitlines()]
    first, *events, last = lines
    assert (first["event"], first["prompt"], first["prompt_ids"]) == ("request", QUESTION, report["prompt_ids"])
    assert first["settings"] == report["settings"]
    assert last["event"] == "result"
    assert last["token_ids"] == report["token_ids"]
    written = {
        p: t for e in events if e["event"] == "committed" for p, t in zip(e["positions"], e["tokens"], strict=True)
    }
    assert [written[position] for position in range(len(report["token_ids"]))] == report["token_ids"]
    assert events[-1]["event"] == "finished"


# --- eval, info, examples


def test_eval_reports_as_json_and_as_a_table(trained_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "--model", str(trained_folder), "--limit", "1", "--max-new-tokens", "8", "--slot-size", "4"]
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert set(report["families"]) == set(FAMILIES)
    assert all(set(entry) == {"accuracy", "tokens_per_forward", "n"} for entry in report["families"].values())
    assert report.keys() >= {"accuracy", "stderr", "tokens_per_forward", "tokens_per_second", "settings"}
    assert report["settings"]["slot_size"] == 4
    assert main([*command, "--method", "autoregressive"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line][2:-3] == [*FAMILIES]


def test_info(trained_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(trained_folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 2_396_352
    assert (report["mask_token_id"], report["eos_token_ids"], report["vocabulary"]) == (4, [3], 89)
    assert report["defaults"] == DecodeConfig().resolve().to_dict()
    assert main(["info", str(trained_folder)]) == 0
    assert "2,396,352" in capsys.readouterr().out


def test_info_reads_the_model_card(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: apache-2.0\n---\n# A tiny model\ntext\n", encoding="utf-8")
    assert cli._card(card) == {"license": "apache-2.0", "card": f"{card} (A tiny model)"}
    assert cli._card(tmp_path / "none.md") == {}


def test_examples_can_be_pasted_into_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "--family", "sudoku", "--count", "2", "--seed", "5"]) == 0
    words = shlex.split(capsys.readouterr().out, comments=True)
    prompts = [item.prompt for item in take("sudoku", "validation", 2, 5)]
    assert [word for word in words if word.startswith("Solve")] == prompts


def test_examples_have_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in rows] == [*FAMILIES]
    for row in rows:
        (item,) = take(row["family"], "validation", 1)
        assert item.prompt == row["prompt"]
        assert item.check(row["answer"])


# --- train


RECIPE = """
name = "tiny"
[data]
rows_per_family = 8
[model]
start = "{start}"
[objective]
method = "refusion"
[training]
max_steps = 2
batch_size = 4
[validation]
every = 2
rows = 7
decode_every = 2
decode_limit = 1
"""


def test_train_writes_a_model_that_generates(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(RECIPE.format(start=trained_folder), encoding="utf-8")
    assert main(["train", "tiny.toml", "--device", "cpu"]) == 0
    run = Path("runs/tiny")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "accuracy" in metrics[-1] and "accuracy_autoregressive" in metrics[-1]
    more = ["train", "tiny.toml", "--resume", "--training.max-steps", "3", "--validation.decode-every=0"]
    assert main([*more, "--device", "cpu"]) == 0
    assert json.loads((run / "recipe.json").read_text())["training"]["max_steps"] == 3
    capsys.readouterr()
    assert main(["generate", "Max has 20 eggs.", "--model", str(run / "last"), "--max-new-tokens", "8", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == RESULT_KEYS


def test_an_interrupted_training_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE.format(start="nowhere"), encoding="utf-8")
    monkeypatch.setattr("refusion.training.loop.train", lambda *_, **__: SimpleNamespace(step=1, tokens=99))
    assert main(["train", str(recipe), "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "stopped and saved at step 1 of 2; --resume continues\n"


# --- the process


def test_a_cold_start_does_not_wait_for_the_compiler(trained_folder: Path) -> None:
    """torch._dynamo and sympy take as long to import as torch itself; drawing initial weights on meta would need them."""
    command = ["generate", "Max has 20 eggs.", "--model", str(trained_folder), "--max-new-tokens", "4"]
    code = f"import sys; from refusion.cli import main; main({command}); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("refusion.cli._load", interrupt)
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


INTERRUPTED_IMPORT = """
import runpy, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "{name}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
sys.argv = ["refusion", "examples"]
runpy.run_module("refusion", run_name="__main__")
"""


@pytest.mark.parametrize("name", ["refusion.cli", "cyclopts", "refusion.evaluation.procedural"])
def test_interrupted_while_modules_are_imported(name: str) -> None:
    code = INTERRUPTED_IMPORT.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_a_reader_that_goes_away_is_no_error() -> None:
    """It is asked for more than a pipe holds, so that the writer has to notice."""
    command = [sys.executable, "-m", "refusion", "examples", "--count", "2000", "--family", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141
