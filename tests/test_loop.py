"""Training runs: exact resume after any kind of end, files that are whole or not there, and plain words when it goes wrong."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from refusion.config import UserError
from refusion.models.checkpoint import load_model, read_config, save_folder
from refusion.models.tokenizer import Tokenizer
from refusion.models.transformer import ModelConfig, Transformer
from refusion.training import loop, suite
from refusion.training.loop import Run, train
from refusion.training.optim import Optimizers, learning_rate
from refusion.training.recipe import Recipe, TrainingRecipe, load

TINY = Path(__file__).parent.parent / "recipes" / "tiny.toml"
FAST = {"data.rows_per_family": "10", "validation.rows": "7", "training.threads": "1", "training.batch_size": "8"}
METHODS = ("refusion", "autoregressive")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to start from, so that not every run learns a vocabulary."""
    tokenizer = suite.learn_tokenizer(330, 0, per_family=20)
    config = ModelConfig("qwen3", tokenizer.vocab_size, 16, 24, 2, 2, 1, 8, qk_norm=True)
    model = Transformer(config).initialize(torch.Generator().manual_seed(0))
    return save_folder(tmp_path_factory.mktemp("models") / "start", model, tokenizer)


def recipe_of(start: Path | str, **overrides: str) -> Recipe:
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return load(TINY, {"model.start": json.dumps(str(start)), **FAST, **named})


def metrics(out: Path) -> list[dict[str, Any]]:
    """What was logged, without what a clock says."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def state(out: Path) -> dict[str, Any]:
    return torch.load(out / "last" / "trainer.pt", weights_only=True)  # type: ignore[no-any-return]


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def same_run(one: Path, other: Path) -> bool:
    folders = all(
        (one / name / file).read_bytes() == (other / name / file).read_bytes()
        for name in ("last", "best") for file in ("model.safetensors", "config.json", "tokenizer.json")
    )  # fmt: skip
    return folders and equal(state(one), state(other)) and metrics(one) == metrics(other)


def interrupt_at(step: int, number: int = signal.SIGINT) -> loop.Decode:
    """Decoding that is interrupted when it is measured for the given time."""
    calls: list[int] = []

    def decode(model: Transformer, tokenizer: Tokenizer, limit: int) -> dict[str, float]:
        calls.append(limit)
        if len(calls) == step:
            signal.raise_signal(number)
        return {}

    return decode


# --- a whole run


@pytest.mark.parametrize("method", METHODS)
def test_the_tiny_recipe_runs_as_it_is_and_learns(method: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = train(load(TINY, {"objective.method": method}), out)
    assert run.step == 20
    logged = [line for line in metrics(out) if "loss" in line]
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.1
    for name in ("last", "best"):
        model, tokenizer = load_model(out / name), Tokenizer.from_folder(out / name)
        config = read_config(out / name)
        assert config.mask_token_id == tokenizer.mask_token_id is not None
        assert config.eos_token_ids == (tokenizer.eos_token_id,) and tokenizer.chat_template
        assert model.config.num_hidden_layers == 2 and tokenizer.vocab_size == model.config.vocab_size == 400
    assert json.loads((out / "recipe.json").read_text())["objective"]["method"] == method
    assert equal({k: v.bfloat16() for k, v in run.model.state_dict().items()},
                 {k: v.bfloat16() for k, v in load_model(out / "last").state_dict().items()})  # fmt: skip


def test_metrics_have_their_keys(start: Path, tmp_path: Path) -> None:
    train(recipe_of(start, training__log_every="3", validation__every="6"), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [3, 6, 9, 12, 15, 18, 20]  # every third, and the last
    for line in steps:
        assert {"step", "loss", "loss_ar", "loss_mdm", "tokens", "tokens_per_second", "lr", "gradient_norm"} <= line.keys()
        assert line["loss"] == pytest.approx(line["loss_ar"] + line["loss_mdm"], rel=1e-6)
        assert all(math.isfinite(value) for value in line.values()) and line["tokens_per_second"] > 0
    assert [line["tokens"] for line in steps] == sorted({line["tokens"] for line in steps})
    validations = [line for line in lines if "loss" not in line]
    assert [line["step"] for line in validations] == [6, 12, 18, 20]
    assert all({"step", "validation_loss_ar", "validation_loss_mdm"} == line.keys() for line in validations)


def test_the_progress_shows_the_last_validation(start: Path, tmp_path: Path) -> None:
    notes: dict[int, str] = {}
    settings = {"training__log_every": "3", "validation__every": "6", "training__max_steps": "8"}
    for method, names in (("refusion", ("ar", "mdm")), ("autoregressive", ("ar",))):
        out = tmp_path / method
        train(
            recipe_of(start, objective__method=method, **settings), out,
            progress=lambda done, total, note: notes.__setitem__(done, note),
        )  # fmt: skip
        assert list(notes) == [3, 6, 8] and "val" not in notes[3]
        for line in (line for line in metrics(out) if "loss" not in line):
            shown = "  ".join(f"val {name} {line[f'validation_loss_{name}']:.3f}" for name in names)
            assert f"  {shown}  " in notes[line["step"]] and notes[line["step"]].count("val ") == len(names)


def test_decoding_is_measured_when_the_recipe_asks_for_it(start: Path, tmp_path: Path) -> None:
    seen: list[tuple[bool, int]] = []

    def decode(model: Transformer, tokenizer: Tokenizer, limit: int) -> dict[str, float]:
        seen.append((model.training, limit))
        return {"accuracy": 0.5, "tokens_per_forward": 3.0}

    settings = {"validation__decode_every": "8", "validation__every": "0", "validation__decode_limit": "5"}
    run = train(recipe_of(start, **settings), tmp_path / "run", decode=decode)
    assert seen == [(False, 5)] * 3 and run.model.training
    lines = [line for line in metrics(tmp_path / "run") if "accuracy" in line]
    assert [line["step"] for line in lines] == [8, 16, 20] and lines[0]["tokens_per_forward"] == 3.0


def test_best_is_the_best(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    far_too_fast = {"training__lr": "3.0", "training__decay_fraction": "0.0", "training__clip": "0.0"}
    run = train(recipe_of(start, validation__every="2", **far_too_fast), out)
    losses = {
        line["step"]: line["validation_loss_ar"] + line["validation_loss_mdm"] for line in metrics(out) if "loss" not in line
    }  # fmt: skip
    best = min(losses, key=lambda step: losses[step])
    assert best != 20
    assert run.best == losses[best]
    assert (out / "best" / "model.safetensors").read_bytes() != (out / "last" / "model.safetensors").read_bytes()


def test_micro_batches_change_next_to_nothing(start: Path, tmp_path: Path) -> None:
    settings = {"training__autocast": "false", "training__optimizer": "adamw", "training__max_steps": "6"}
    whole = train(recipe_of(start, **settings), tmp_path / "whole")
    parts = train(recipe_of(start, training__micro_batch_size="3", **settings), tmp_path / "parts")
    for name, value in whole.model.state_dict().items():
        assert torch.allclose(value, parts.model.state_dict()[name], atol=2e-4), name
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_the_seed_decides(start: Path, tmp_path: Path) -> None:
    short = {"training__max_steps": "4"}
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        train(recipe_of(start, training__seed=seed, **short), tmp_path / name)
    assert same_run(tmp_path / "a", tmp_path / "b")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


# --- resume


@pytest.mark.parametrize(("method", "optimizer"), [("refusion", "muon"), ("refusion", "adamw"), ("autoregressive", "muon")])
def test_a_resumed_run_is_bit_for_bit_one_that_was_never_interrupted(
    start: Path, tmp_path: Path, optimizer: str, method: str
) -> None:
    settings = {
        "training__optimizer": optimizer, "objective__method": method, "training__max_steps": "13",
        "training__micro_batch_size": "5", "validation__every": "4", "validation__decode_every": "1",
    }  # fmt: skip
    recipe = recipe_of(start, **settings)
    train(recipe, tmp_path / "whole")
    for stop in (1, 6):  # between checkpoints and measurements, twice in one run
        run = train(recipe, tmp_path / "cut", resume=stop > 1, decode=interrupt_at(1 if stop == 1 else 5))
        assert run.step == stop == state(tmp_path / "cut")["step"]
    assert train(recipe, tmp_path / "cut", resume=True).step == 13
    assert same_run(tmp_path / "whole", tmp_path / "cut")


def test_averaged_weights_are_saved_and_validated_and_resume_bit_for_bit(start: Path, tmp_path: Path) -> None:
    recipe = recipe_of(start, training__ema="0.8", training__max_steps="9", validation__every="4", validation__decode_every="1")
    run = Run(recipe_of(start, training__max_steps="9"), tmp_path / "by hand")
    expected = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for _ in range(9):
        run.advance()
        for name, p in run.model.named_parameters():
            expected[name] = 0.8 * expected[name] + 0.2 * p.detach()
    whole = train(recipe, tmp_path / "whole")
    saved = state(tmp_path / "whole")
    for name, p in whole.model.named_parameters():
        assert torch.equal(p, run.model.state_dict()[name]) and torch.equal(p, saved["model"][name])
        torch.testing.assert_close(saved["averages"][name], expected[name], rtol=1e-5, atol=1e-7)
    loaded = load_model(tmp_path / "whole" / "last", "cpu", "float32")
    for name, p in loaded.named_parameters():
        assert torch.equal(p, saved["averages"][name].to(torch.bfloat16).float())
    with whole.averaged():
        averaged = whole.validate()
    assert averaged != whole.validate()
    last = [line for line in metrics(tmp_path / "whole") if "validation_loss_ar" in line][-1]
    assert averaged.items() <= last.items()
    train(recipe, tmp_path / "cut", decode=interrupt_at(5))
    train(recipe, tmp_path / "cut", resume=True)
    assert same_run(tmp_path / "whole", tmp_path / "cut")


def test_averages_can_begin_later(start: Path, tmp_path: Path) -> None:
    train(recipe_of(start, training__max_steps="5"), tmp_path / "run")
    assert state(tmp_path / "run")["averages"] == {}
    train(recipe_of(start, training__max_steps="6", training__ema="0.5"), tmp_path / "run", resume=True)
    assert state(tmp_path / "run")["averages"].keys() <= state(tmp_path / "run")["model"].keys()
    broken = state(tmp_path / "run") | {"averages": {"x": 1}}
    torch.save(broken, tmp_path / "run" / "last" / "trainer.pt")
    with pytest.raises(UserError, match=r"trainer\.pt is broken or does not fit the recipe: its averaged weights"):
        train(recipe_of(start, training__max_steps="7", training__ema="0.5"), tmp_path / "run", resume=True)


def test_layers_computed_again_change_no_bit(start: Path, tmp_path: Path) -> None:
    kept: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    held = []
    for name, again in (("as usual", "false"), ("again", "true")):
        run = Run(recipe_of(start, training__checkpointing=again), tmp_path / name)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            run.advance()
        held.append(sum(kept))
        kept.clear()
        train(recipe_of(start, training__checkpointing=again, training__max_steps="3"), tmp_path / f"{name} run")
    assert equal(state(tmp_path / "as usual run"), state(tmp_path / "again run"))
    assert held[1] < 0.5 * held[0]


def test_resuming_does_not_need_the_folder_that_the_run_started_from(start: Path, tmp_path: Path) -> None:
    recipe = recipe_of(start, validation__decode_every="1")
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "cut", decode=interrupt_at(3))
    gone = recipe_of(tmp_path / "gone", validation__decode_every="1")
    train(gone, tmp_path / "cut", resume=True)
    assert same_run(tmp_path / "whole", tmp_path / "cut")


def test_resuming_a_finished_run_changes_nothing(start: Path, tmp_path: Path) -> None:
    recipe, out = recipe_of(start), tmp_path / "run"
    train(recipe, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert train(recipe, out, resume=True).step == 20
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_can_be_made_longer(start: Path, tmp_path: Path) -> None:
    """With a rate that does not depend on the end, the longer run is the one that had the length from the start."""
    flat = {"training__decay_fraction": "0.0", "validation__every": "5"}
    train(recipe_of(start, training__max_steps="10", **flat), tmp_path / "cut")
    train(recipe_of(start, training__max_steps="15", **flat), tmp_path / "cut", resume=True)
    train(recipe_of(start, training__max_steps="15", **flat), tmp_path / "whole")
    assert equal(state(tmp_path / "whole"), state(tmp_path / "cut"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_step_saves_and_gives_the_signal_back(start: Path, tmp_path: Path, number: int) -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    recipe = recipe_of(start, validation__decode_every="1", training__save_every="100")
    run = train(recipe, tmp_path / "run", decode=interrupt_at(4, number))
    assert run.step == 4 == state(tmp_path / "run")["step"]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_interrupt_acts_at_once(start: Path, tmp_path: Path) -> None:
    def decode(model: Transformer, tokenizer: Tokenizer, limit: int) -> dict[str, float]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        train(recipe_of(start, validation__decode_every="2"), tmp_path / "run", decode=decode)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train(recipe_of(start), tmp_path / "run", resume=True).step == 20


# --- killed


def _child(recipe: Recipe, out: Path, resume: bool) -> None:
    torch.set_num_threads(1)
    run = train(recipe, out, resume=resume)
    os._exit(0 if run.step == recipe.training.max_steps else 3)


def launch(recipe: Recipe, out: Path, resume: bool) -> BaseProcess:
    """A process that trains. Processes are forked from one that has loaded everything, so they start at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["refusion.training.loop", "torch._dynamo"])  # optimizers load the latter
    process = context.Process(target=_child, args=(recipe, out, resume))
    process.start()
    return process


def wait_for(condition: Callable[[], bool], process: BaseProcess, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        if not process.is_alive():
            return
        time.sleep(0.001)


KILL_ME = {
    "training__max_steps": "40", "training__save_every": "2", "training__log_every": "1", "validation__every": "3",
    "training__decay_fraction": "0.5",
}  # fmt: skip


@pytest.fixture(scope="session")
def uninterrupted(start: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A whole run in a process of its own, and how long its steps took."""
    out = tmp_path_factory.mktemp("killed") / "whole"
    process = launch(recipe_of(start, **KILL_ME), out, False)
    wait_for(lambda: (out / "metrics.jsonl").exists(), process)
    began = time.monotonic()
    process.join()
    assert process.exitcode == 0
    return out, time.monotonic() - began


def killed_and_resumed(start: Path, out: Path, moments: list[float]) -> int:
    """Kill a run, after so many seconds from its first step on, and go on; at last to the end. Returns how often that hit."""
    recipe, hits = recipe_of(start, **KILL_ME), 0
    for moment in moments:
        process = launch(recipe, out, out.exists())
        lines = _lines(out)
        wait_for(lambda before=lines: _lines(out) != before, process)  # type: ignore[misc]
        time.sleep(moment)
        process.kill()
        process.join()
        hits += process.exitcode == -signal.SIGKILL
    process = launch(recipe, out, True)
    process.join()
    assert process.exitcode == 0
    return hits


def _lines(out: Path) -> bytes:
    path = out / "metrics.jsonl"
    return path.read_bytes() if path.exists() else b""


def leftovers(out: Path) -> list[str]:
    return [path.name for path in out.rglob(".*")] + [path.name for path in out.rglob("*.part*")]


def test_a_killed_run_resumes_bit_for_bit(start: Path, tmp_path: Path, uninterrupted: tuple[Path, float]) -> None:
    whole, seconds = uninterrupted
    rng = random.Random()
    moments = [rng.uniform(0, 0.3) * seconds for _ in range(3)]
    assert killed_and_resumed(start, tmp_path / "cut", moments) >= 1
    assert same_run(whole, tmp_path / "cut"), moments
    assert not leftovers(tmp_path / "cut")


@pytest.mark.slow
def test_a_run_killed_twenty_times_resumes_bit_for_bit(
    start: Path, tmp_path: Path, uninterrupted: tuple[Path, float]
) -> None:
    whole, seconds = uninterrupted
    rng, hits = random.Random(), 0
    for case in range(10):
        moments = [rng.uniform(0, 0.5) * seconds for _ in range(2)]
        hits += killed_and_resumed(start, tmp_path / f"cut{case}", moments)
        assert same_run(whole, tmp_path / f"cut{case}"), moments
        assert not leftovers(tmp_path / f"cut{case}")
    assert hits >= 15


def test_ctrl_c_in_a_process_of_its_own(start: Path, tmp_path: Path, uninterrupted: tuple[Path, float]) -> None:
    recipe, out = recipe_of(start, **KILL_ME), tmp_path / "cut"
    process = launch(recipe, out, False)
    wait_for(lambda: _lines(out) != b"", process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 3  # ended by itself, before the last step
    assert 0 < state(out)["step"] < 40
    train(recipe, out, resume=True)
    assert same_run(uninterrupted[0], out)


def test_a_run_killed_before_its_first_checkpoint_begins_again(start: Path, tmp_path: Path) -> None:
    recipe = recipe_of(start)
    train(recipe, tmp_path / "whole")
    for resume in (True, False):
        out = tmp_path / f"cut-{resume}"
        out.mkdir()
        (out / "recipe.json").write_text("{}")
        (out / "metrics.jsonl").write_text('{"step": 2, "loss": 9.0}\n{"step"')  # cut short
        (out / ".last.0123.tmp").mkdir()
        (out / ".last.0123.tmp" / "config.json").write_text("")
        train(recipe, out, resume=resume)
        assert same_run(tmp_path / "whole", out) and not leftovers(out)


def test_a_line_of_metrics_that_was_cut_short_is_forgotten(start: Path, tmp_path: Path) -> None:
    recipe = recipe_of(start, validation__decode_every="1")
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "cut", decode=interrupt_at(8))
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "loss": 1.0}\n{"step": 12, "lo')
    train(recipe, tmp_path / "cut", resume=True)
    assert same_run(tmp_path / "whole", tmp_path / "cut")


GARBAGE = b"""not JSON
[1]
{"loss": 1.0}
{"step": "3"}
{"step": null}

\xff\xfe
"""


def test_lines_of_metrics_that_cannot_be_read_are_dropped_and_counted(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = recipe_of(start, validation__decode_every="1"), tmp_path / "cut"
    train(recipe, tmp_path / "whole")
    train(recipe, out, decode=interrupt_at(8))
    log = out / "metrics.jsonl"
    first, rest = log.read_bytes().split(b"\n", 1)
    log.write_bytes(GARBAGE + first + b"\n" + GARBAGE + b"[" * 100_000 + b"\n" + rest + b"\x00")
    capsys.readouterr()
    train(recipe, out, resume=True)
    assert capsys.readouterr().err == f"note: {log}: 13 lines cannot be read and were dropped\n"
    assert same_run(tmp_path / "whole", out)


@pytest.mark.parametrize("content", [b"", b"\n\n", GARBAGE, b"\x00" * 1000, b"[" * 100_000])
def test_no_content_of_metrics_stops_a_resumed_run(start: Path, tmp_path: Path, content: bytes) -> None:
    recipe, out = recipe_of(start, training__max_steps="2"), tmp_path / "run"
    train(recipe, out)
    (out / "metrics.jsonl").write_bytes(content)
    (out / "recipe.json").write_text("[]")
    assert train(recipe, out, resume=True).step == 2


FULL = OSError(28, "No space left on device")
WRITER = "[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nframe #0"
FAILURES = [
    ("last", "torch.save", FULL, "No space left"), ("last", "torch.save", RuntimeError(WRITER), "trainer.pt: .*unexpected pos"),
    ("last", "refusion.models.checkpoint.save_file", FULL, "No space left"),
    ("best", "refusion.models.checkpoint.save_file", FULL, "No space left"),
    ("best", "refusion.models.checkpoint.save_file", SafetensorError("I/O error: No space\nleft"), "I/O error: No space left"),
    ("last", "refusion.models.checkpoint._fsync", FULL, "No space left"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fails", "error", "words"), FAILURES)
def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(
    start: Path, tmp_path: Path, name: str, fails: str, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object, **named: object) -> None:
        raise error

    out = tmp_path / "run"
    run = train(recipe_of(start, training__max_steps="2"), out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr(fails, failing)
    with pytest.raises(UserError, match=f"^{out / name}: cannot be written \\(.*{words}") as caught:
        run.save(name)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert not leftovers(out)


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from refusion.cli import main
sys.exit(main({command}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
@pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt", "metrics.jsonl"])
def test_a_real_refusal_to_write_is_one_line_and_leaves_the_old_checkpoint(
    start: Path, tmp_path: Path, file: str
) -> None:
    """The system refuses all bytes of a file beyond a limit, as a full disk does."""
    out = tmp_path / "run"
    train(recipe_of(start, training__max_steps="2"), out)
    before = {path: path.read_bytes() for path in (out / "last").iterdir()}
    limit = {"trainer.pt": 100_000, "model.safetensors": 10_000, "metrics.jsonl": 100}[file]
    settings = {**FAST, "model.start": json.dumps(str(start)), "training.max_steps": "4"}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    command = ["train", str(TINY), "--device", "cpu", "--out", str(out), "--resume", *words]
    code = LIMITED.format(limit=limit, command=command)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    *notes, complaint = done.stderr.splitlines()
    assert all(note.startswith("note: ") for note in notes)
    assert complaint.startswith(f"error: {out}") and "File too large" in complaint
    assert {path: path.read_bytes() for path in (out / "last").iterdir()} == before
    assert not leftovers(out)


# --- refusals


def refusal(recipe: Recipe, out: Path, **settings: bool) -> str:
    with pytest.raises(UserError) as caught:
        train(recipe, out, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_with_a_run_is_refused_and_left_alone(start: Path, tmp_path: Path) -> None:
    recipe, out = recipe_of(start, training__max_steps="2"), tmp_path / "run"
    train(recipe, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    text = refusal(recipe_of(start, training__max_steps="3"), out)
    assert str(out) in text and "--resume" in text
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_nothing_to_resume(start: Path, tmp_path: Path) -> None:
    assert "nothing to resume" in refusal(recipe_of(start), tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "last").mkdir(parents=True)
    assert "config.json" in refusal(recipe_of(start), tmp_path / "run", resume=True)


def test_a_file_in_the_way(start: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        assert "cannot be written" in refusal(recipe_of(start), out)


def test_a_checkpoint_that_does_not_fit_the_recipe(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(load(TINY, {**FAST, "training.max_steps": "2"}), out)
    text = refusal(load(TINY, {**FAST, "model.hidden_size": "64"}), out, resume=True)
    assert "does not fit the recipe: model.hidden_size is 32 there and 64 in the recipe" in text
    text = refusal(load(TINY, {**FAST, "training.optimizer": "adamw"}), out, resume=True)
    assert "trainer.pt" in text and "does not fit the recipe" in text
    for content, words in (
        ([1, 2], "it holds a list"), ({}, "its 'model' is missing"), ({"model": {}}, "its 'optimizers' is missing"),
        ({**state(out), "step": "2"}, "its 'step' is of a wrong kind"), ({**state(out), "model": {}}, "Missing key"),
        ({**state(out), "optimizers": []}, "zip"), ({**state(out), "model": {"x": 1}}, "Missing key"),
    ):  # fmt: skip
        torch.save(content, out / "last" / "trainer.pt")
        text = refusal(load(TINY, FAST), out, resume=True)
        assert f"{out / 'last' / 'trainer.pt'} is broken or does not fit the recipe: " in text
        assert words in text
    (out / "last" / "trainer.pt").write_bytes(b"broken")
    assert "trainer.pt is broken" in refusal(load(TINY, FAST), out, resume=True)
    (out / "last" / "trainer.pt").unlink()
    assert "nothing to resume" in refusal(load(TINY, FAST), out, resume=True)


def test_data_smaller_than_a_batch(start: Path, tmp_path: Path) -> None:
    text = refusal(recipe_of(start, training__batch_size="71"), tmp_path / "run")
    assert "training.batch_size (71) is larger than the data (70 rows)" in text


def short_of(start: Path, folder: Path, context: int) -> str:
    """The model to start from, with another length of context."""
    shutil.copytree(start, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    return str(folder)


def test_rows_longer_than_the_context_are_dropped_and_counted(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = sorted(Run(recipe_of(start), tmp_path / "whole").batches.store.lengths.tolist())
    context = lengths[40]
    recipe = recipe_of(short_of(start, tmp_path / "short", context), training__max_steps="2")
    run = train(recipe, tmp_path / "run")
    dropped = sum(length > context for length in lengths)
    assert run.dropped == dropped > 0 and len(run.batches.store) == 70 - dropped
    assert run.batches.store.lengths.tolist() == [n for n in _in_order(start, tmp_path) if n <= context]
    assert f"note: {dropped} rows are longer than the context and were dropped\n" in capsys.readouterr().err
    assert all((batch.tokens >= 0).sum(1).max() <= context for batch in run.validation)
    text = refusal(recipe_of(tmp_path / "short", training__batch_size="70"), tmp_path / "large")
    assert f"larger than the data ({70 - dropped} rows, {dropped} more are longer than the context)" in text


def _in_order(start: Path, tmp_path: Path) -> list[int]:
    lengths: list[int] = Run(recipe_of(start), tmp_path / "again").batches.store.lengths.tolist()
    return lengths


def test_a_context_that_no_row_fits_is_named(start: Path, tmp_path: Path) -> None:
    text = refusal(recipe_of(short_of(start, tmp_path / "short", 4)), tmp_path / "run")
    assert "every row of the suite's train split is longer than the model's context of 4 tokens" in text


def test_an_end_of_sequence_outside_the_vocabulary_is_named(start: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(start, tmp_path / "model"))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in settings.items() if k != "eos_token"}))
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), "eos_token_id": 10**12}))
    assert f"{folder}: end-of-sequence id {10**12} is outside" in refusal(recipe_of(folder), tmp_path / "run")


def test_no_such_model_to_start_from(tmp_path: Path) -> None:
    assert "no such model folder" in refusal(recipe_of(tmp_path / "none"), tmp_path / "run")


# --- what is not a number


def test_nan_stops_with_the_batch_saved(start: Path, tmp_path: Path) -> None:
    model = load_model(start)
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    save_folder(tmp_path / "nan", model, Tokenizer.from_folder(start))
    recipe, out = recipe_of(tmp_path / "nan", training__micro_batch_size="3"), tmp_path / "run"
    text = refusal(recipe, out)
    assert "loss is not finite at step 0" in text and "nan-batch.npz" in text
    saved = np.load(out / "nan-batch.npz")
    batch = Run(recipe, tmp_path / "other").batches.batch(0)
    assert saved["tokens"].shape[0] == 8  # all of it, not only the first micro-batch
    for name in ("tokens", "positions", "targets", "losses", "weights", "counts"):
        assert np.array_equal(saved[name], np.asarray(getattr(batch, name)))
    assert not (out / "last").exists()


def test_a_gradient_that_is_not_finite_does_not_touch_the_weights(start: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = Run(recipe_of(start), tmp_path / "run")
    run.advance()
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(UserError, match="gradient is not finite at step 1"):
        run.advance()
    assert equal(before, dict(run.model.state_dict()))


# --- learning rates


def rates(**settings: Any) -> list[float]:
    recipe = TrainingRecipe(**{"max_steps": 100, "lr": 2.0, "warmup_steps": 10, **settings})
    return [learning_rate(step, recipe) for step in range(recipe.max_steps)]


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_warm_up_is_linear_and_reaches_the_rate(schedule: str) -> None:
    assert rates(schedule=schedule)[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert max(rates(schedule=schedule)) == 2.0
    assert rates(schedule=schedule, warmup_steps=0)[0] == 2.0


def test_wsd_is_stable_and_then_falls_in_a_line() -> None:
    rate = rates(schedule="wsd", decay_fraction=0.2)
    assert rate[9:81] == [2.0] * 72
    assert rate[80:] == pytest.approx([2.0 * left / 20 for left in range(20, 0, -1)])
    assert rates(schedule="wsd", decay_fraction=0.0)[9:] == [2.0] * 91
    low = rates(schedule="wsd", decay_fraction=0.2, min_lr_ratio=0.5)
    assert low[-1] == pytest.approx(1.0 + 1.0 / 20) and low[80] == 2.0


def test_cosine_falls_from_the_rate_to_the_least() -> None:
    rate = rates(schedule="cosine")
    assert rate[10] == 2.0 and rate[55] == pytest.approx(1.0) and 0 < rate[99] < 0.001
    assert rate[9:] == sorted(rate[9:], reverse=True)
    low = rates(schedule="cosine", min_lr_ratio=0.1)
    assert low[55] == pytest.approx(1.1) and low[99] == pytest.approx(0.2, rel=0.01)


def test_the_rate_and_the_clipping_arrive_in_the_step() -> None:
    """AdamW's first step has the size of the rate; norms and embeddings do not decay, matrices do."""
    for optimizer in ("adamw", "muon"):
        config = ModelConfig("qwen3", 31, 16, 24, 1, 2, 1, 8, qk_norm=True)
        model = Transformer(config).initialize(torch.Generator().manual_seed(0))
        recipe = TrainingRecipe(max_steps=1, optimizer=optimizer, weight_decay=0.5)
        optimizers = Optimizers(model, recipe)
        before = {name: value.clone() for name, value in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model.model.norm.weight.grad = torch.full((16,), 3.0)
        assert optimizers.step(0.01, 1.0) == pytest.approx(12.0)  # the norm before clipping
        after = dict(model.named_parameters())
        assert torch.allclose(after["model.norm.weight"], torch.full((16,), 0.99), atol=1e-5)
        assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
        matrix = "model.layers.0.mlp.up_proj.weight"
        assert torch.allclose(after[matrix], before[matrix] * (1 - 0.01 * 0.5), atol=1e-6)
        assert all(parameter.grad is None for parameter in model.parameters())
