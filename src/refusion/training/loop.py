"""The training loop: single process, exact resume, checkpoints that appear whole or not at all.

A run's folder:
    last/            a Hugging Face folder, plus trainer.pt (optimizer, float32 weights, step)
    best/            the folder with the best validation so far
    metrics.jsonl    one JSON object a line: steps, validations
    recipe.json      what was run
    data.json        what files it is trained on

Contract: a run that was interrupted (Ctrl-C, SIGKILL) and resumed computes bit for bit what an uninterrupted one computes,
because batches depend on (seed, step) alone and everything else is in trainer.pt. Resuming reads the tokenizer and the shape
from `last`, so it does not matter what has become of the folder that a run started from.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refusion.config import UserError
from refusion.methods.base import Objective, TokenIds, TrainingRow
from refusion.methods.registry import METHODS
from refusion.models.checkpoint import (
    FolderConfig,
    load_model,
    read_config,
    resolve_folder,
    save_folder,
)
from refusion.models.tokenizer import Tokenizer, one_line
from refusion.models.transformer import ModelConfig, Transformer
from refusion.training import shards, suite
from refusion.training.data import Batch, Batches, Mixture, collate
from refusion.training.optim import Optimizers, learning_rate
from refusion.training.recipe import ObjectiveRecipe, Recipe, ignored
from refusion.training.step import accumulate, evaluate

# Kernels are made anew for every shape that a processor's library has not seen lately: few widths, a tenth more padding, and
# 1.2 times the speed.
WIDTH_MULTIPLE = 16

Decode = Callable[[Transformer, Tokenizer, int], dict[str, float]]
Progress = Callable[[int, int, str], None]  # steps done, steps in all, a note


def make_objective(recipe: ObjectiveRecipe, ids: TokenIds) -> Objective:
    """The objective that a recipe names."""
    method = METHODS[recipe.method]
    return method.objective(ids, {name: getattr(recipe, name) for name in method.settings})


class Run:
    """One training run: everything that a step needs, and what is saved. With `resume`, as it was when it was last saved."""

    def __init__(
        self, recipe: Recipe, out: Path, device: str = "cpu", *, resume: bool = False, progress: Progress | None = None
    ) -> None:
        self.recipe, self.out, self.device, self._progress = recipe, out, device, progress
        if recipe.training.threads:
            torch.set_num_threads(recipe.training.threads)
        self.step, self.tokens, self.best = 0, 0, math.inf
        self.validated: dict[str, float] = {}  # by the last validation since the start of this process
        start = out / "last" if resume else recipe.model.start
        self.tokenizer, self.model = self._saved_model() if resume else self._model()
        self._know_ends(None if start is None else read_config(resolve_folder(start)))
        self.objective = make_objective(recipe.objective, TokenIds(self.tokenizer.mask_token_id, self.eos))
        data, batch_size = recipe.data, recipe.training.batch_size
        self.sources: dict[str, list[shards.Report]] = {}  # what has become of each file, of either split
        train, self.dropped = self._rows("train")
        if train.per_epoch < batch_size:
            dropped = f", {self.dropped} more are longer than the context" if self.dropped else ""
            raise UserError(f"training.batch_size ({batch_size}) is larger than the data ({train.per_epoch} rows{dropped})")
        self.batches = Batches(
            train, self.objective, batch_size, recipe.training.seed, infill_fraction=data.infill_fraction
        )  # fmt: skip
        self.validation = self._validation_batches()
        self.model.checkpointing = recipe.training.checkpointing
        self.optimizers = Optimizers(self.model, recipe.training)
        self._averages: dict[str, torch.Tensor] = {}
        if resume:
            self._restore()
        if recipe.training.ema and not self._averages:
            self._averages = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _know_ends(self, folder: FolderConfig | None) -> None:
        """End-of-sequence ids, the one that answers are taught to end with, and settings that travel with the model."""
        own = self.tokenizer.eos_token_id
        self.eos = folder.eos_token_ids if folder is not None else () if own is None else (own,)
        if not self.eos:
            raise UserError(f"{self.recipe.model.start}: names no end-of-sequence token")
        self.end = own if own is not None else self.eos[0]
        if self.end >= self.model.config.vocab_size:
            raise UserError(f"{self.recipe.model.start}: end-of-sequence id {self.end!s:.40} is outside the vocabulary")
        settings = {} if folder is None else {k: v for k, v in folder.defaults.items() if k != "method"}
        self.defaults = {**settings, **self.recipe.objective.decoding}

    def _model(self) -> tuple[Tokenizer, Transformer]:
        shape = self.recipe.model
        if shape.start is not None:
            folder = resolve_folder(shape.start)
            return Tokenizer.from_folder(folder), load_model(folder, self.device, "float32").train()
        data = self.recipe.data
        tokenizer = suite.learn_tokenizer(data.vocabulary, data.seed, min(10_000, data.rows_per_family))
        config = ModelConfig(
            "qwen3", tokenizer.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers,
            shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, qk_norm=True,
            max_position_embeddings=shape.max_position_embeddings,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(self.recipe.training.seed)
        return tokenizer, Transformer(config).initialize(generator).to(self.device).train()

    def _saved_model(self) -> tuple[Tokenizer, Transformer]:
        """Tokenizer and model of `last`; the weights there are rounded, the exact ones follow from trainer.pt."""
        last, recipe = self.out / "last", self.recipe.model
        shape = read_config(last).model
        for name in (f.name for f in fields(recipe) if f.name != "start" and recipe.start is None):
            if getattr(shape, name) != getattr(recipe, name):
                raise UserError(
                    f"{last} does not fit the recipe: model.{name} is {getattr(shape, name)} there "
                    f"and {getattr(recipe, name)} in the recipe"
                )
        return Tokenizer.from_folder(last), load_model(last, self.device, "float32").train()

    def _rows(self, split: str) -> tuple[Mixture, int]:
        """Training or validation rows, of the suite or of files, and how many were too long."""
        data, cache, context = self.recipe.data, self.out / "data", self.model.config.max_position_embeddings
        paths, weights = (data.train, data.weights) if split == "train" else (data.validation, None)
        if paths is not None:
            encoding = shards.Encoding(self.tokenizer, self.end, context, self.model.config.vocab_size, data.too_long)
            rows, reports = shards.shards(paths, weights, encoding, cache, split, self._progress)
            self.sources[split] = reports
            return rows, sum(report.too_long for report in reports)
        per_family = data.rows_per_family if split == "train" else -(-self.recipe.validation.rows // len(suite.FAMILIES))
        seed, shares = (data.seed, data.family_weights) if split == "train" else (0, None)
        if self.tokenizer.vocab_size > self.model.config.vocab_size:
            raise UserError(
                f"{self.recipe.model.start}: its tokenizer does not fit: {self.tokenizer.vocab_size} tokens, and the model has "
                f"{self.model.config.vocab_size}"
            )
        store, dropped = suite.rows(self.tokenizer, split, per_family, seed, context, cache, shares)
        return Mixture([store]), dropped

    def _validation_batches(self) -> list[Batch]:
        rows, _ = self._rows("validation")
        size = min(64, len(rows))
        batches = Batches(rows, self.objective, size, 12345)
        return [self._collated(list(batches.rows(i))) for i in range(batches.steps_per_epoch)]

    def micro_batches(self) -> list[Batch]:
        rows = list(self.batches.rows(self.step))
        size = self.recipe.training.micro_batch_size or len(rows)
        return [self._collated(rows[i : i + size]) for i in range(0, len(rows), size)]

    def _collated(self, rows: list[TrainingRow]) -> Batch:
        return collate(rows, len(self.objective.losses), WIDTH_MULTIPLE, self.recipe.training.packed_length)

    def advance(self) -> dict[str, float]:
        """One optimisation step; returns what happened. Raises `UserError` on NaN, with the batch saved."""
        recipe = self.recipe.training
        batches = self.micro_batches()
        report = accumulate(self.model, batches, self.objective.losses, recipe.autocast)
        if not math.isfinite(report["loss"]):
            raise self._not_finite("loss")
        lr = learning_rate(self.step, recipe)
        report["gradient_norm"] = self.optimizers.step(lr, recipe.clip)
        if not math.isfinite(report["gradient_norm"]):
            raise self._not_finite("gradient")
        self._average()
        self.step += 1
        self.tokens += sum(batch.real_tokens for batch in batches)
        return {**report, "lr": lr}

    def _not_finite(self, what: str) -> UserError:
        """Save the global batch of this step, so that it can be looked at, and say where."""
        path, batch = self.out / "nan-batch.npz", self.batches.batch(self.step)
        np.savez(
            path, allow_pickle=False, step=self.step, tokens=batch.tokens, positions=batch.positions, targets=batch.targets,
            losses=batch.losses, weights=batch.weights, counts=np.array(batch.counts), segments=batch.segments,
            prefixes=batch.prefixes, bidirectional=batch.bidirectional, documents=batch.documents,
        )  # fmt: skip
        return UserError(f"the {what} is not finite at step {self.step}; its batch is in {path}")

    @torch.no_grad()
    def _average(self) -> None:
        if decay := self.recipe.training.ema:
            for name, parameter in self.model.named_parameters():
                self._averages[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has its averaged weights meanwhile, if there are any."""
        if not self.recipe.training.ema:
            yield
            return
        exact = {name: parameter.data for name, parameter in self.model.named_parameters()}
        try:
            for name, parameter in self.model.named_parameters():
                parameter.data = self._averages[name]
            yield
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = exact[name]

    def validate(self) -> dict[str, float]:
        report = evaluate(self.model, self.validation, self.objective.losses, self.recipe.training.autocast)
        self.model.train()
        self.validated = {name.removeprefix("loss_"): value for name, value in report.items()}
        return {f"validation_{name}": value for name, value in report.items()}

    # --- files ---

    def save(self, name: str) -> None:
        """Write the folder "last" or "best". Raises `UserError` naming it when that fails; then it is as it was."""
        exact = {key: tensor.detach() for key, tensor in self.model.state_dict().items()}
        with self.averaged():
            save_folder(
                self.out / name, self.model, self.tokenizer, eos_token_ids=self.eos, defaults=self.defaults,
                more=(lambda folder: self._save_state(folder, exact)) if name == "last" else None,
            )  # fmt: skip

    def _save_state(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        state = {
            "model": weights, "optimizers": self.optimizers.state_dict(), "step": self.step, "tokens": self.tokens,
            "best": self.best, "averages": self._averages,
        }  # fmt: skip
        try:
            with open(folder / "trainer.pt", "wb") as file:
                torch.save(state, file)
        except RuntimeError as error:  # the writer's own, on top of what the system said
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else OSError(f"trainer.pt: {_reason(error)}") from None

    def _restore(self) -> None:
        path = self.out / "last" / "trainer.pt"
        try:
            state = _checked_state(torch.load(path, weights_only=True))
            self.model.load_state_dict(state["model"])
            self.optimizers.load_state_dict(state["optimizers"])
        except FileNotFoundError:
            raise UserError(f"nothing to resume: {path} does not exist") from None
        except Exception as error:  # torch's unpickler has no error of its own: IndexError, EOFError, RuntimeError, ...
            raise UserError(f"{path} is broken or does not fit the recipe: {_reason(error)}") from None
        self.step, self.tokens, self.best = state["step"], state["tokens"], state["best"]
        if self.recipe.training.ema:
            self._averages = _checked_averages(state.get("averages"), self.model, path)
        _truncate_metrics(self.out / "metrics.jsonl", self.step)

    def log(self, record: dict[str, Any]) -> None:
        with open(self.out / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _reason(error: Exception) -> str:
    """What an error says, as one line of bearable length."""
    text = one_line(error) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


STATE = {"model": dict, "optimizers": list, "step": int, "tokens": int, "best": float}  # what trainer.pt holds


def _checked_state(state: Any) -> dict[str, Any]:
    """What was read from trainer.pt, if it is what `Run.save` writes there; else a `ValueError` says what is not."""
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not the state of a run")
    for name, kind in STATE.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"its {name!r} is " + ("of a wrong kind" if name in state else "missing"))
    return state


def _checked_averages(averages: Any, model: Transformer, path: Path) -> dict[str, torch.Tensor]:
    """Averaged weights of trainer.pt, on the model's device; none if the run had none until then."""
    if not averages:
        return {}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if not isinstance(averages, dict) or {name: getattr(a, "shape", None) for name, a in averages.items()} != shapes:
        raise UserError(f"{path} is broken or does not fit the recipe: its averaged weights")
    return {name: averages[name].to(p.device) for name, p in model.named_parameters()}


def _truncate_metrics(path: Path, step: int) -> None:
    """Forget what was logged after the checkpoint (it will be computed again), a last line that was cut short, and
    lines that cannot be read; of the latter, say how many."""
    if not path.exists():
        return
    lines = [line for line in path.read_bytes().split(b"\n")[:-1] if line.strip()]
    steps = [_step_of(line) for line in lines]
    if lost := steps.count(None):
        _note(f"{path}: {lost:,} lines cannot be read and were dropped")
    part = path.with_name(".metrics.tmp")
    kept = (line for line, logged in zip(lines, steps, strict=True) if logged is not None and logged <= step)
    try:
        part.write_bytes(b"".join(line + b"\n" for line in kept))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _step_of(line: bytes) -> int | None:
    """The step of a line of metrics.jsonl; None if it is no such line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM set a flag; the loop finishes its step, saves and ends. A second signal acts as it did before."""
    caught: list[int] = []

    def catch(number: int, frame: object) -> None:
        caught.append(number)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        restore()


def _prepare(recipe: Recipe, out: Path, resume: bool) -> bool:
    """Make the run's folder ready. Returns whether there is a checkpoint to go on from: a run that was killed before its
    first one begins again."""
    last = out / "last"
    if last.exists() and not resume:
        raise UserError(f"{out} holds a run already; continue it with --resume or choose another --out")
    if resume and not last.exists() and not (out / "recipe.json").exists():
        raise UserError(f"nothing to resume: {out} holds no run")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not resume and not (out / "recipe.json").exists() and any(out.iterdir()):
            raise UserError(f"{out} is not empty and holds no run; choose another --out")
        # of a process that was killed while it saved; a folder inside a folder has two dots
        for pattern in (".last.*.tmp", ".best.*.tmp", "..last.*.tmp", "..best.*.tmp", ".metrics.tmp"):
            for unfinished in out.glob(pattern):
                shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
        if not last.exists():
            (out / "metrics.jsonl").unlink(missing_ok=True)
            _write_recipe(recipe, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    return last.exists()


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _note_changes(recipe: Recipe, out: Path, step: int) -> None:
    """Say what a resumed run does otherwise than before, and keep the former recipe as recipe-before-STEP.json."""
    path = out / "recipe.json"
    try:
        before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(asdict(recipe)))
    except (OSError, ValueError):
        return
    if not isinstance(before, dict):
        return
    changed = [
        f"{section}.{key} is {value!r}, was {before[section].get(key)!r}"
        for section, table in now.items() if isinstance(table, dict) and isinstance(before.get(section), dict)
        for key, value in table.items() if before[section].get(key) != value
    ]  # fmt: skip
    if changed and step:
        _note(f"from step {step} on: {'; '.join(changed)}")
        os.replace(path, out / f"recipe-before-{step}.json")


def _enough_disk(run: Run) -> None:
    """Raises `UserError` when what is saved next to what is there does not fit: better now than in the first save."""
    weights = sum(p.numel() for p in run.model.parameters())
    needed = weights * 2 + weights * (2 + 4 + 8)  # best: bf16; last: bf16, exact weights and two moments
    free = shutil.disk_usage(run.out)[2]
    if free < needed:
        raise UserError(f"{run.out}: too little disk: checkpoints take {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free")


def _same_data(run: Run, resume: bool) -> None:
    """Write down of what bytes and with which tokenizer a run's rows are made, if they come from files. Resumed, it must be the
    same: raises `UserError` with what has changed."""
    if not run.sources:
        return
    path = run.out / "data.json"
    now = {
        "tokenizer": run.tokenizer.fingerprint,
        **{split: [{"file": r.file, "sha256": r.sha256, "rows": r.rows, "tokens": r.tokens} for r in reports]
           for split, reports in run.sources.items()},
    }  # fmt: skip
    before = None
    if resume:
        with suppress(OSError, ValueError):
            before = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(before, dict) and (changed := _data_changes(before, now)):
        raise UserError(
            f"{run.out}: the data is not what the run began with: {'; '.join(changed)}. Put it back, or begin a new run with "
            f"model.start = {str(run.out / 'last')!r}"
        )
    path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")


def _data_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is otherwise, in words."""
    changed = ["the tokenizer has changed"] if before.get("tokenizer") != now["tokenizer"] else []
    for split in ("train", "validation"):
        old, new = ({r["sha256"]: r for r in manifest.get(split, [])} for manifest in (before, now))
        names = {r["file"] for r in old.values()} & {r["file"] for r in new.values()}
        for report in new.values():
            if report["sha256"] not in old:
                was = next((r for r in old.values() if r["file"] == report["file"]), None)
                then = "is new" if was is None else f"has changed ({was['rows']:,} rows then, {report['rows']:,} now)"
                changed.append(f"{report['file']} {then}")
        gone = [r["file"] for r in old.values() if r["sha256"] not in new and r["file"] not in names]
        changed += [f"{file} is missing in data.{split}" for file in gone]
        if not changed and list(old) != list(new):
            changed.append(f"the files of data.{split} are in another order")
    return changed


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the run's folder: two processes in it would disturb each other. A killed process holds nothing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out} is in use by another process") from None
        yield
    finally:
        os.close(lock)


@contextmanager
def _files_of(out: Path) -> Iterator[None]:
    """The log, the rows, the recipe: what the system says of a file of the run names the run's folder."""
    try:
        yield
    except BrokenPipeError:  # whoever read the progress has gone
        raise
    except OSError as error:
        raise UserError(f"{out}: {one_line(error)}") from None


def _write_recipe(recipe: Recipe, out: Path) -> None:
    (out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n", encoding="utf-8")


def train(
    recipe: Recipe, out: Path, *, resume: bool = False, device: str = "cpu", decode: Decode | None = None,
    progress: Progress | None = None,
) -> Run:  # fmt: skip
    """Run a recipe in folder `out`. `decode(model, tokenizer, limit)` measures accuracy by decoding, if the recipe asks for it.

    `progress(done, total, note)` is told how far it has come, every `log_every` steps; the note holds the loss, and that of
    the last validation.
    Ctrl-C or SIGTERM: the step is finished and saved, and the run returned as it is, with `step` below `max_steps`.
    Raises `UserError` when `out` holds a run already and `resume` is not set, when there is nothing to resume or it does not
    fit the recipe, when a file of the run cannot be written, and when the loss is not finite any more.
    """
    for name in ignored(recipe):
        _note(f"{name} has no effect with {recipe.objective.method}")
    if resume and not out.exists():
        raise UserError(f"nothing to resume: {out} holds no run")
    with _files_of(out), _alone(out):
        resume = _prepare(recipe, out, resume)
        run = Run(recipe, out, device, resume=resume, progress=progress)
        for report in chain.from_iterable(run.sources.values()):
            _note(str(report))
        if run.dropped and not run.sources:
            _note(f"{run.dropped:,} rows are longer than the context and were dropped")
        _same_data(run, resume)
        _enough_disk(run)
        if resume:
            _note_changes(recipe, out, run.step)
        _write_recipe(recipe, out)
        _loop(run, decode if recipe.data.train is None else None, progress or (lambda done, total, note: None))
    return run


def _loop(run: Run, decode: Decode | None, progress: Progress) -> None:
    settings = run.recipe.training
    with _interruptible() as interrupted:
        began, tokens = time.monotonic(), run.tokens
        while run.step < settings.max_steps:
            report = run.advance()
            done = run.step == settings.max_steps
            due = run.step % settings.log_every == 0 or done
            if due:
                speed = (run.tokens - tokens) / (time.monotonic() - began)
                began, tokens = time.monotonic(), run.tokens
                run.log({"step": run.step, **report, "tokens": run.tokens, "tokens_per_second": round(speed, 1)})
            _measure(run, decode, done)
            if due:
                checked = "".join(f"  val {name} {value:.3f}" for name, value in run.validated.items())
                progress(run.step, settings.max_steps, f"loss {report['loss']:.3f}{checked}  {speed:,.0f} tokens/s")
            stop = interrupted()
            if run.step % settings.save_every == 0 or done or stop:
                run.save("last")
            if stop:
                break


def _measure(run: Run, decode: Decode | None, done: bool) -> None:
    """Validation when it is due: both losses, and decoding accuracy with tokens per forward."""
    plan, record = run.recipe.validation, {}
    with run.averaged():
        if plan.every and (run.step % plan.every == 0 or done):
            record = run.validate()
        if decode is not None and plan.decode_every and (run.step % plan.decode_every == 0 or done):
            record |= decode(run.model.eval(), run.tokenizer, plan.decode_limit)
            run.model.train()
    if not record:
        return
    run.log({"step": run.step, **record})
    loss = sum(value for name, value in record.items() if name.startswith("validation_loss"))
    if loss and loss < run.best:
        run.best = loss
        run.save("best")
