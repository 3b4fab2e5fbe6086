"""`refusion bench`: models and methods on the same prompts, so that the figures can be compared.

What makes it fair:
* one engine for all, and token by token always beside it, by the same weights where they can;
* the same prompts, in turn: for every prompt (of larger batches: every `ROUNDS` batches of prompts) each contestant answers once
  before the next prompt comes, in an order that rotates, so that a machine that gets slower or faster favours none;
* warm-up before the clock, several repeats, the median and its interval (bootstrap over prompts);
* tokens after the end never count; tokens per forward is all tokens over all forwards.

Contract: knows nothing of the terminal; `run` returns plain JSON values. Times are wall clock on an otherwise idle machine:
nothing here can know whether it is.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from refusion.config import CONFIGS, GenerationConfig, UserError, nearest
from refusion.engine import Engine
from refusion.evaluation import procedural
from refusion.evaluation.report import plane
from refusion.events import Committed, Event
from refusion.generate import Model, Result

Progress = Callable[[int, int, str], None]
BASELINE = "autoregressive"
RESAMPLES = 1000  # of the bootstrap
ROUNDS = 4  # batches that a contestant answers before the next has its turn: the last ones of a batch have little company


@dataclass(frozen=True)
class Contestant:
    """A model with the settings that it is measured at."""

    model: Model
    config: GenerationConfig
    batch_size: int = 1  # prompts that are answered at once

    @property
    def label(self) -> str:
        return f"{self.model.name}, {self.config.method}" + (f", {self.batch_size} at once" if self.batch_size > 1 else "")


@dataclass(frozen=True)
class Measurement:
    """One answer and what it took. All times in seconds."""

    result: Result
    right: bool
    seconds: float  # of the machine: of answers that were written at once, each has its equal share
    first_event: float  # until the first forward was done: prompt included
    first_commit: float
    memory: int  # bytes


@dataclass
class Measured:
    """All answers of one contestant, by repeat and prompt."""

    contestant: Contestant
    repeats: list[list[Measurement]] = field(default_factory=list)

    def row(self, rng: random.Random) -> dict[str, Any]:
        """The figures, as `run` reports them."""
        first = self.repeats[0]
        stats = [m.result.stats for m in first]
        tokens, forwards = sum(s.tokens for s in stats), sum(s.forwards for s in stats)
        method, size = self.contestant.config.method, self.contestant.batch_size
        speeds = [_speed(repeat) for repeat in self.repeats]
        later = [_speed(repeat, after_first=True, early=int(method == BASELINE)) for repeat in self.repeats]
        accuracy = sum(m.right for m in first) / len(first)
        latencies = sorted(m.result.stats.seconds for repeat in self.repeats for m in repeat)
        return {
            "model": self.contestant.model.name, "method": method,
            "settings": self.contestant.model.settings(self.contestant.config).to_dict(),
            "parameters": self.contestant.model.folder.parameters, "batch_size": size, "n": len(first),
            "accuracy": accuracy, "stderr": math.sqrt(accuracy * (1 - accuracy) / len(first)),
            "tokens": tokens, "forwards": forwards, "tokens_per_forward": tokens / max(1, forwards),
            "rows_per_token": sum(s.rows for s in stats) / max(1, tokens),
            "tokens_per_second": statistics.median(speeds),
            "tokens_per_second_interval": _interval(self.repeats, rng),
            "tokens_per_second_after_first_forward": statistics.median(later) if size == 1 else None,
            "first_commit_seconds": statistics.median(m.first_commit for repeat in self.repeats for m in repeat),
            "latency_seconds": {f"p{p}": _percentile(latencies, p) for p in (50, 90, 99)},
            "peak_memory_bytes": max(m.memory for repeat in self.repeats for m in repeat),
            "repeats": len(self.repeats),
        }  # fmt: skip


def _speed(measurements: Sequence[Measurement], after_first: bool = False, early: int = 0) -> float:
    """Tokens a second over all answers. With `after_first`, without the time of each answer's first forward, which holds the
    prompt, and without the `early` tokens that are written by then."""
    tokens = sum(m.result.stats.tokens - early for m in measurements)
    seconds = sum(m.seconds - (min(m.first_event, m.seconds) if after_first else 0) for m in measurements)
    return tokens / seconds if seconds > 0 else 0.0


def _interval(repeats: Sequence[Sequence[Measurement]], rng: random.Random) -> list[float]:
    """95% interval of tokens a second, by bootstrap over prompts (each with all its repeats)."""
    count = len(repeats[0])
    tokens = [sum(repeat[i].result.stats.tokens for repeat in repeats) for i in range(count)]
    seconds = [sum(repeat[i].seconds for repeat in repeats) for i in range(count)]
    speeds = []
    for _ in range(RESAMPLES):
        chosen = rng.choices(range(count), k=count)
        speeds.append(sum(tokens[i] for i in chosen) / max(1e-9, sum(seconds[i] for i in chosen)))
    speeds.sort()
    return [speeds[int(0.025 * RESAMPLES)], speeds[int(0.975 * RESAMPLES) - 1]]


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` of the ordered values do not exceed (nearest rank).

    >>> _percentile([1.0, 2.0, 3.0, 4.0], 50), _percentile([1.0, 2.0, 3.0, 4.0], 99)
    (2.0, 4.0)
    """
    return ordered[max(0, -(-int(percent * len(ordered)) // 100) - 1)]


# --- the run


def contestants(
    models: Sequence[Model], methods: Sequence[str], settings: Sequence[dict[str, Any]], batch_sizes: Sequence[int] = (1,)
) -> list[Contestant]:  # fmt: skip
    """Every method, at every setting, on the models that have learnt it, or, if none has, on all that can try; and token by
    token, on all models that have learnt to predict the next token.

    settings: each a set of settings by name; a method takes those that it knows, and counts once what becomes the same. Raises
    `UserError` for an unknown method, or one that no model can do.
    """
    for name in methods:
        if name not in CONFIGS:
            raise UserError(f"unknown method {name!r}; there is {', '.join(CONFIGS)}{nearest(name, CONFIGS)}")
    wanted = list(dict.fromkeys([*methods, BASELINE]))
    found: dict[str, Contestant] = {}
    for model in models:
        for name in wanted:
            learnt = [m for m in models if (m.by_token if name == BASELINE else m.method == name)]
            if model not in (learnt or [m for m in models if m.has_mask and name in methods]):
                continue
            for given in settings or [{}]:
                known = {key: value for key, value in given.items() if key in CONFIGS[name].__dataclass_fields__}
                contestant = Contestant(model, CONFIGS[name](**known))
                found.setdefault(f"{model.name} {name} {model.settings(contestant.config)}", contestant)
    missing = set(methods) - {c.config.method for c in found.values()}
    if missing:
        raise UserError(f"none of the models can write by {', '.join(sorted(missing))}: that needs a mask token")
    for size in batch_sizes:
        if size < 1:
            raise UserError(f"batch sizes must be at least 1, got {size}")
    return [replace(contestant, batch_size=size) for size in dict.fromkeys(batch_sizes) for contestant in found.values()]


def run(
    entries: Sequence[Contestant], *, suite: str = "nano", split: str = "test", limit: int = 10, repeats: int = 3,
    warmup: int = 2, seed: int = 0, progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure all contestants on the first `limit` tasks of every family.

    Returns {"rows": [...], "machine": {...}, "suite", "split"}; a row has the figures of one contestant. Answers are the same in
    every repeat, so accuracy is that of the first.
    """
    if suite != "nano":
        raise UserError(f"unknown suite {suite!r}; there is nano")
    for name, value, least in (("limit", limit, 1), ("repeats", repeats, 1), ("warmup", warmup, 0)):
        if value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    items = [item for family in procedural.FAMILIES for item in procedural.take(family, split, limit)]
    for item in items[:: max(1, len(items) // max(1, warmup))][:warmup]:
        for entry in entries:
            measure(entry, [item] * entry.batch_size)
    measured = [Measured(entry) for entry in entries]
    total, done = repeats * len(items) * len(entries), 0
    for repeat in range(repeats):
        for one in measured:
            one.repeats.append([])
        for size in dict.fromkeys(entry.batch_size for entry in entries):
            alike = [one for one in measured if one.contestant.batch_size == size]
            for number, group in enumerate(_groups(items, 1 if size == 1 else ROUNDS * size)):
                for one in _rotated(alike, repeat + number):
                    one.repeats[-1] += measure(one.contestant, group)
                    done += len(group)
                    if progress is not None:
                        progress(done, total, one.contestant.label)
    rng = random.Random(seed)
    rows = [one.row(rng) for one in measured]
    _add_ratios(rows)
    return {"suite": suite, "split": split, "rows": rows, "machine": machine(entries[0].model)}


def _groups(items: Sequence[procedural.Item], size: int) -> Iterator[Sequence[procedural.Item]]:
    yield from (items[i : i + size] for i in range(0, len(items), size))


def _rotated(entries: list[Measured], by: int) -> list[Measured]:
    by %= len(entries)
    return entries[by:] + entries[:by]


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    """How many times faster than the same model token by token, as many at once, in this run; if it cannot, than the first
    model that can."""
    base = {(row["model"], row["batch_size"]): row["tokens_per_second"] for row in rows if row["method"] == BASELINE}
    for row in rows:
        other = next((speed for (_, size), speed in base.items() if size == row["batch_size"]), 0.0)
        speed = base.get((row["model"], row["batch_size"]), other)
        row["speedup"] = row["tokens_per_second"] / speed if speed else None


def measure(entry: Contestant, items: Sequence[procedural.Item]) -> list[Measurement]:
    """Some tasks, answered one by one, or with `batch_size` answers under way as long as there are so many."""
    return [_alone(entry, item) for item in items] if entry.batch_size == 1 else _at_once(entry, items)


def _at_once(entry: Contestant, items: Sequence[procedural.Item]) -> list[Measurement]:
    """Times of an answer count from its turn on."""
    _reset_memory(entry.model)
    engine = Engine(entry.model, entry.batch_size)
    numbers = [engine.add(item.prompt, entry.config) for item in items]
    began, first_event, first_commit = dict[int, float](), dict[int, float](), dict[int, float]()
    results, memory, start = dict[int, Result](), 0, time.perf_counter()
    while not engine.idle:
        turn = time.perf_counter()
        for number, heard in engine.tick():
            now = time.perf_counter()
            if isinstance(heard, Result):
                results[number] = heard
                continue
            first_event.setdefault(number, now)
            if isinstance(heard, Committed):
                first_commit.setdefault(number, now)
        began |= {number: turn for number in engine.running if number not in began}
        memory = max(memory, _memory(entry.model))
    share = (time.perf_counter() - start) / len(items)
    return [
        Measurement(results[n], item.check(results[n].text), share, first_event[n] - began[n],
                    first_commit.get(n, first_event[n]) - began[n], memory)
        for n, item in zip(numbers, items, strict=True)
    ]  # fmt: skip


def _alone(entry: Contestant, item: procedural.Item) -> Measurement:
    """One answer; the time of what is done here between two events is not the model's."""
    _reset_memory(entry.model)
    stream = entry.model.stream(item.prompt, entry.config)
    began, first_event, first_commit, memory = time.perf_counter(), 0.0, 0.0, 0
    while True:
        try:
            event: Event = next(stream)
        except StopIteration as stop:
            result: Result = stop.value
            break
        now = time.perf_counter() - began
        first_event = first_event or now
        if isinstance(event, Committed) and not first_commit:
            first_commit = now
        memory = max(memory, _memory(entry.model))
    seconds = result.stats.seconds
    return Measurement(result, item.check(result.text), seconds, first_event, first_commit or seconds, memory)


# --- the machine


def _reset_memory(model: Model) -> None:
    device = model.transformer.lm_head.weight.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _memory(model: Model) -> int:
    """Bytes: on CUDA the peak that torch had allocated, on a CPU what the whole process holds now (0 where unknown)."""
    device = model.transformer.lm_head.weight.device
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def machine(model: Model) -> dict[str, Any]:
    """What the figures were measured on."""
    weight = model.transformer.lm_head.weight
    device = torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else _processor()
    return {
        "device": device, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "dtype": str(weight.dtype).removeprefix("torch."), "torch": torch.__version__, "python": platform.python_version(),
        "system": platform.system(), "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# --- for people


def write(report: dict[str, Any], folder: Path) -> None:
    """`bench.json`, `bench.md` and `bench.svg` (accuracy and speed) into `folder`. Raises `UserError` when they cannot be
    written, or without matplotlib."""
    picture = plane([{**row, "entry": f"{row['model']}, {row['method']}, {row['batch_size']} at once"} for row in report["rows"]])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (folder / "bench.md").write_text(markdown(report) + "\n\n![accuracy and speed](bench.svg)\n", encoding="utf-8")
        (folder / "bench.svg").write_bytes(picture)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None


def markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    head = (
        "| model | method | at once | accuracy | tokens/forward | rows/token | tokens/s (95%) | after the first forward | speed-up "
        "| first commit | p50 / p99 | memory |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in report["rows"]:
        low, high = row["tokens_per_second_interval"]
        latency, later = row["latency_seconds"], row["tokens_per_second_after_first_forward"]
        lines.append(
            f"| {row['model']} | {row['method']} | {row['batch_size']} | {row['accuracy']:.3f} | {row['tokens_per_forward']:.2f} "
            f"| {row['rows_per_token']:.1f} | {row['tokens_per_second']:,.0f} ({low:,.0f}-{high:,.0f}) "
            f"| {'' if later is None else format(later, ',.0f')} "
            f"| {'' if row['speedup'] is None else format(row['speedup'], '.2f')} | {row['first_commit_seconds'] * 1000:.0f} ms "
            f"| {latency['p50'] * 1000:.0f} / {latency['p99'] * 1000:.0f} ms | {row['peak_memory_bytes'] / 2**20:,.0f} MiB |"
        )
    m = report["machine"]
    where = f"{m['device']}, {m['threads']} of {m['cores']} cores, {m['dtype']}, torch {m['torch']}"
    count = report["rows"][0]
    note = f"{count['n']} tasks ({report['suite']}, {report['split']} split), {count['repeats']} repeats, methods in turn. {where}."
    return "\n".join([*lines, "", note])
