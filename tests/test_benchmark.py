"""Running a benchmark: figures, presets, samples that are written at once and continued only under the same settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refusion.cli import main
from refusion.config import AutoregressiveConfig, DecodeConfig, UserError
from refusion.evaluation import benchmark, tasks
from refusion.evaluation.presets import PAPER, preset
from refusion.generate import Result, Stats

DATA = Path(__file__).parent / "data" / "benchmarks"
GSM8K = DATA / "gsm8k" / "test.jsonl"
KEYS = {"accuracy", "stderr", "n", "tokens_per_forward", "tokens_per_second", "samples", "settings", "model", "task"}


@dataclass
class Scripted:
    """Stands in for a model: one token a character, and answers by a rule (default: all right but the second)."""

    rule: Callable[[str], str] = lambda prompt: "#### 99" if "shed" in prompt else f"so #### {8 if 'rolls' in prompt else -4}"
    name: str = "scripted"
    context: int = 1000
    defaults: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)

    @property
    def folder(self) -> SimpleNamespace:
        return SimpleNamespace(defaults=self.defaults)

    @property
    def transformer(self) -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(max_position_embeddings=self.context))

    def settings(self, config: Any) -> Any:
        return config.resolve(self.defaults)

    def encode(self, prompt: str) -> list[int]:
        return [ord(character) for character in prompt]

    def generate(self, ids: list[int], config: Any) -> Result:
        prompt = "".join(map(chr, ids))
        self.asked.append(prompt)
        self.configs.append(config)
        assert len(ids) + config.max_new_tokens <= self.context
        text = self.rule(prompt)
        stats = Stats(len(ids), 20, 4 if len(self.asked) % 2 else 16, 99, 1, 0.5)
        return Result(text, [1] * 20, "stop", (), stats, config.to_dict(), tuple(ids))


def run(model: Scripted, path: Path, name: str = "gsm8k", data: Path = GSM8K, config: Any = None, **options: Any) -> Any:
    return benchmark.run(model, name, data, config=config or DecodeConfig(), samples=path, **options)  # type: ignore[arg-type]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_report_and_samples(tmp_path: Path) -> None:
    model, path, seen = Scripted(), tmp_path / "s.jsonl", list[tuple[int, int, str]]()
    report = run(model, path, progress=lambda *state: seen.append(state))
    assert report.keys() >= KEYS and json.loads(json.dumps(report)) == report
    assert report["accuracy"] == pytest.approx(2 / 3) and report["n"] == 3
    assert report["stderr"] == pytest.approx((2 / 3 * 1 / 3 / 3) ** 0.5)
    assert report["tokens_per_forward"] == pytest.approx(60 / 24), "all tokens over all forwards"
    assert report["tokens_per_second"] == pytest.approx(40) and report["samples"] == str(path)
    assert (report["unanswered"], report["cut_off"], report["too_long"], report["shortened"]) == (0, 0, 0, 0)
    header, *samples = lines_of(path)
    assert header["settings"] == report["settings"] and header["task"] == "gsm8k" and header["model"] == "scripted"
    assert [s["number"] for s in samples] == [0, 1, 2] and [s["right"] for s in samples] == [True, False, True]
    assert [s["prompt"] for s in samples] == model.asked
    assert samples[1]["response"] == "#### 99" and (samples[1]["extracted"], samples[1]["gold"]) == ("99", "1800")
    assert (samples[0]["tokens"], samples[0]["forwards"], samples[0]["seconds"]) == (20, 4, 0.5)
    assert seen[0] == (0, 3, "") and seen[-1] == (3, 3, "accuracy 0.667")


def test_groups_are_counted_on_their_own(tmp_path: Path) -> None:
    model = Scripted(rule=lambda prompt: "the answer is (B)")
    report = run(model, tmp_path / "s.jsonl", "mmlu-pro", DATA / "mmlu-pro")
    assert report["groups"] == {"business": {"accuracy": 0.5, "n": 2}, "physics": {"accuracy": 1.0, "n": 1}}
    assert run(model, tmp_path / "t.jsonl", "mmlu-pro", DATA / "mmlu-pro", limit=2)["groups"].keys() == {"business", "physics"}
    assert any(line.startswith("physics") for line in benchmark.table(report))


def test_a_model_that_knows_everything_is_always_right(tmp_path: Path) -> None:
    for name in ("gsm8k", "mbpp", "humaneval", "bbh", "gpqa"):
        golds = {item.prompt: item.gold for item in tasks.load(tasks.TASKS[name], DATA / name)}
        assert run(Scripted(rule=golds.__getitem__), tmp_path / name, name, DATA / name)["accuracy"] == 1.0, name


# --- settings


def test_presets() -> None:
    assert PAPER.keys() == {"mmlu-pro", "arc-c", "gsm8k", "math", "gpqa", "humaneval", "mbpp"}
    assert preset("paper", "math") == {
        "max_new_tokens": 512, "slot_threshold": 0.8, "token_threshold": 0.6, "slot_size": 32, "block_size": 64, "temperature": 0.0,
    }  # fmt: skip
    assert preset("default", "bbh") == preset("default", "gsm8k") == {"max_new_tokens": 512}
    with pytest.raises(UserError, match="the paper has no settings for bbh"):
        preset("paper", "bbh")
    with pytest.raises(UserError, match="'paper'"):
        preset("papr", "gsm8k")


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("paper", DecodeConfig(), (32, 128, 0.9, 0.4, 512)),
        ("paper", DecodeConfig(slot_size=4, token_threshold=0.5, max_new_tokens=64), (4, 128, 0.9, 0.5, 64)),
        ("paper", DecodeConfig(block_size=16), (16, 16, 0.9, 0.4, 512)),
        ("default", DecodeConfig(), (2, 32, 0.7, 0.4, 512)),
        ("default", DecodeConfig(slot_threshold=0.6), (2, 32, 0.6, 0.4, 512)),
    ],
)  # fmt: skip
def test_flags_win_over_the_preset_and_that_over_the_model(name: str, config: Any, expected: Any, tmp_path: Path) -> None:
    model = Scripted(defaults={"slot_size": 2, "slot_threshold": 0.7, "max_new_tokens": 9, "method": "refusion"})
    report = run(model, tmp_path / "s.jsonl", config=config, preset_name=name)
    s = report["settings"]
    assert (s["slot_size"], s["block_size"], s["slot_threshold"], s["token_threshold"], s["max_new_tokens"]) == expected
    assert len(set(model.configs)) == 1, "the same for all items"


def test_token_by_token_takes_only_the_length(tmp_path: Path) -> None:
    report = run(Scripted(), tmp_path / "s.jsonl", config=AutoregressiveConfig(), preset_name="paper")
    assert report["method"] == "autoregressive" and report["settings"]["max_new_tokens"] == 512
    assert "slot_size" not in report["settings"]


def test_answers_shrink_to_the_context_and_prompts_without_room_are_wrong(tmp_path: Path) -> None:
    lengths = sorted(len(item.prompt) for item in tasks.load(tasks.TASKS["gsm8k"], GSM8K))
    model = Scripted(context=lengths[-1])
    report = run(model, tmp_path / "s.jsonl")
    assert (report["n"], report["too_long"], report["shortened"]) == (3, 1, 2)
    assert sorted(config.max_new_tokens for config in model.configs) == [lengths[-1] - n for n in lengths[1::-1]]
    assert "prompts do not fit" in "\n".join(benchmark.table(report))


# --- samples


class Killed(BaseException):
    """As a run ends that is not asked."""


def killed_after(count: int, path: Path) -> Scripted:
    model = Scripted()

    def progress(done: int, total: int, note: str) -> None:
        if done == count:
            raise Killed

    with pytest.raises(Killed):
        run(model, path, progress=progress)
    return model


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{**line, "forwards": 0} for line in lines_of(path)]


@pytest.mark.parametrize("tail", ["", '{"number": 2, "right": tr'])
def test_a_killed_run_goes_on_where_it_stopped(tail: str, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "s.jsonl"
    run(Scripted(), whole)
    assert len(killed_after(2, path).asked) == 2
    with path.open("a") as file:
        file.write(tail)
    model = Scripted()
    report = run(model, path, resume=True)
    assert len(model.asked) == 1, "only what was not answered"
    assert report["n"] == 3 and report["accuracy"] == pytest.approx(2 / 3)
    assert without_times(path) == without_times(whole)
    again = Scripted()
    assert run(again, path, resume=True, limit=2)["n"] == 2 and not again.asked, "fewer: nothing to do"


def test_resuming_nothing_starts(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").touch()
    assert run(Scripted(), tmp_path / "s.jsonl", resume=True)["n"] == 3


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"config": DecodeConfig(slot_size=4)}, r"settings\.slot_size"), ({"config": AutoregressiveConfig()}, "method"),
        ({"config": DecodeConfig(temperature=0.5)}, r"settings\.temperature"), ({"name": "mbpp", "data": DATA / "mbpp"}, "task"),
    ],
)  # fmt: skip
def test_other_settings_are_never_mixed_in(options: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    killed_after(1, path)
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"--resume.*{word}"):
        run(Scripted(), path, resume=True, **options)
    assert path.read_bytes() == before


def test_another_model_and_other_data_are_never_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = tmp_path / "s.jsonl", tmp_path / "test.jsonl"
    killed_after(1, path)
    with pytest.raises(UserError, match="model = 'scripted', now it is 'other'"):
        run(Scripted(name="other"), path, resume=True)
    data.write_text("".join(reversed(GSM8K.read_text().splitlines(keepends=True))))
    with pytest.raises(UserError, match="other data"):
        run(Scripted(), path, data=data, resume=True)
    monkeypatch.setattr(benchmark, "_weights", lambda name: "trained further")
    with pytest.raises(UserError, match="weights"):
        run(Scripted(), path, resume=True)


def test_weights_have_a_name_of_their_own(trained_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained_folder, copy)
    assert benchmark._weights(str(copy)) == benchmark._weights(str(trained_folder)) is not None
    weights = copy / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert benchmark._weights(str(copy)) != benchmark._weights(str(trained_folder))
    assert benchmark._weights("training") is None


def test_a_new_run_keeps_the_older_file_and_no_other_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    run(Scripted(), path)
    before = path.read_bytes()
    run(Scripted(), path, config=DecodeConfig(slot_size=4))
    assert (tmp_path / "s.jsonl.old").read_bytes() == before and len(lines_of(path)) == 4
    path.write_text("my notes\n")
    for resume in (False, True):
        with pytest.raises(UserError, match="no file of samples"):
            run(Scripted(), path, resume=resume)
    assert path.read_text() == "my notes\n"


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    run(Scripted(), path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "{\n", *lines[3:]]))
    with pytest.raises(UserError, match=r"s\.jsonl:3: is broken"):
        run(Scripted(), path, resume=True)


# --- the command


def test_the_command(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["eval", "--model", str(trained_folder), "--task", "gsm8k", "--data", str(GSM8K), "--device", "cpu"]
    command += ["--max-new-tokens", "8"]
    assert main([*command, "--limit", "2", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report.keys() >= KEYS and report["n"] == 2 and report["settings"]["max_new_tokens"] == 8
    path = tmp_path / report["samples"]
    assert path.name == "samples-gsm8k-decode-trained.jsonl" and len(lines_of(path)) == 3
    assert main([*command, "--resume", "--preset", "default"]) == 0
    out = capsys.readouterr().out
    assert "accuracy" in out and "gsm8k" in out and str(path.name) in out
    assert len(lines_of(path)) == 4
    assert main([*command, "--preset", "paper", "--samples", "p.jsonl", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["slot_size"], settings["block_size"], settings["max_new_tokens"]) == (32, 128, 8)


def test_an_interrupted_run_says_how_to_go_on(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "run", interrupt)
    assert main(["eval", "--model", str(trained_folder), "--task", "gsm8k", "--data", str(GSM8K), "--device", "cpu"]) == 130
    assert "--resume" in capsys.readouterr().err


MISUSES = {
    "unknown task": (["--task", "gsm8"], "'gsm8k'"),
    "no data": (["--task", "gsm8k"], "https://github.com/openai/grade-school-math"),
    "missing data": (["--task", "humaneval", "--data", "/no/such.jsonl"], "https://github.com/openai/human-eval"),
    "unknown preset": (["--task", "gsm8k", "--data", str(GSM8K), "--preset", "papers"], "--preset"),
    "not in the paper": (["--task", "bbh", "--data", str(DATA / "bbh"), "--preset", "paper"], "bbh"),
    "no items asked": (["--task", "gsm8k", "--data", str(GSM8K), "--limit", "0"], "limit"),
    "samples that cannot be written": (["--task", "gsm8k", "--data", str(GSM8K), "--samples", "/no/such/s.jsonl"], "--samples"),
    "data without a task": (["--data", str(GSM8K)], "--task"),
    "resume without a task": (["--resume"], "--task"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_one_line_and_exit_code_2(
    misuse: str, trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, named = MISUSES[misuse]
    assert main(["eval", "--model", str(trained_folder), "--device", "cpu", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert named in captured.err
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_the_help_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in tasks.TASKS)
