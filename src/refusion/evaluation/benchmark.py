"""A model on a published benchmark: every item answered, judged and written down; then the figures.

Contract: all settings are fixed before the first item and are the same for all of them; only the length of an answer shrinks where
prompt and answer together would leave the model's context (`shortened`). An item whose prompt leaves no room at all counts as
wrong (`too_long`). Figures are made from the file of samples alone, so an interrupted and resumed run has those of a whole one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from refusion.config import UserError
from refusion.evaluation import tasks
from refusion.evaluation.presets import preset, with_preset
from refusion.evaluation.samples import Samples, default_path
from refusion.evaluation.tasks import Item, Task
from refusion.generate import Config, Model
from refusion.models.checkpoint import resolve_folder

Progress = Callable[[int, int, str], None]
ENDS_OF_WEIGHTS = 1 << 16  # bytes at both ends of a file that tell one set of weights from another


def run(
    model: Model, name: str, data: Path | None, *, config: Config, preset_name: str = "default", limit: int | None = None,
    samples: Path | None = None, resume: bool = False, progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Answer the first `limit` items (None: all) of a benchmark.

    config: what was set explicitly; the preset fills the rest. samples: where answers go (default: `default_path`). Returns
    the report as plain JSON values. Raises `UserError` for what cannot be read, written or done.
    """
    task = tasks.task_named(name)
    _check_limit(limit)
    settings = with_preset(config, model, preset(preset_name, name))
    items = tasks.load(task, data, settings.seed or 0)[:limit]
    path = samples or default_path(name, model.name)
    with Samples(path, _header(model, name, settings), resume) as file:
        _check_prompts(file, items)
        for number in _open(file, items, progress):
            file.add(number, _sample(model, task, items[number], settings))
        done = [file.done[number] for number in range(len(items))]
    assert settings.max_new_tokens is not None
    return {
        "model": model.name, "task": name, "method": settings.method, "preset": preset_name, "data": str(data),
        **figures(done, settings.max_new_tokens), "samples": str(path), "settings": settings.to_dict(),
    }  # fmt: skip


def check(name: str, data: Path | None, preset_name: str, limit: int | None) -> None:
    """Raises what `run` would, of all that can be known before a model is there."""
    preset(preset_name, tasks.task_named(name).name)
    _check_limit(limit)
    tasks.load(tasks.task_named(name), data)


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1, got {limit}")


def _open(file: Samples, items: Sequence[Item], progress: Progress | None) -> Iterator[int]:
    """The numbers of the items that have no answer yet; tells how far the work has come, before the first and after each."""
    left = [number for number in range(len(items)) if number not in file.done]
    right = sum(bool(file.done[number]["right"]) for number in range(len(items)) if number in file.done)
    done, report = len(items) - len(left), progress or (lambda *_: None)
    report(done, len(items), "")
    for number in left:
        yield number
        done, right = done + 1, right + bool(file.done[number]["right"])
        report(done, len(items), f"accuracy {right / done:.3f}")


def _header(model: Model, task: str, settings: Config) -> dict[str, Any]:
    """What all samples of a file have in common."""
    return {
        "task": task, "model": model.name, "weights": _weights(model.name), "method": settings.method,
        "settings": settings.to_dict(),
    }  # fmt: skip


def _weights(name: str) -> str | None:
    """A short name for the weights in a model's folder, so that a model that was trained further is not taken for the same."""
    try:
        files = sorted(resolve_folder(name).glob("*.safetensors"))
    except UserError:  # a model that is in no folder
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(opened.read(ENDS_OF_WEIGHTS))
            opened.seek(max(0, file.stat().st_size - ENDS_OF_WEIGHTS))
            digest.update(opened.read())
    return digest.hexdigest()[:16] if files else None


def _check_prompts(file: Samples, items: Sequence[Item]) -> None:
    """What was answered before must be what is asked now."""
    for number, line in file.done.items():
        if number < len(items) and line.get("prompt") != items[number].prompt:
            raise UserError(
                f"--resume: {file.path} answers another item {number}: it was begun with other data; give --samples another name"
            )


def _sample(model: Model, task: Task, item: Item, settings: Config) -> dict[str, Any]:
    """One answer with its verdict and what it took."""
    asked: dict[str, Any] = {"prompt": item.prompt, "gold": item.gold, "group": item.group}
    ids = model.encode(item.prompt)
    room = model.transformer.config.max_position_embeddings - len(ids)
    assert settings.max_new_tokens is not None
    if room < 1:
        nothing = {"response": "", "extracted": None, "right": False, "note": "the prompt leaves no room in the context"}
        return {**asked, **nothing, "tokens": 0, "forwards": 0, "seconds": 0.0, "finish_reason": "too long", "room": 0}
    result = model.generate(ids, replace(settings, max_new_tokens=min(settings.max_new_tokens, room)))
    verdict, stats = task.verdict(item, result.text), result.stats
    return {
        **asked, "response": result.text, "extracted": verdict.extracted, "right": verdict.right, "note": verdict.note,
        "tokens": stats.tokens, "forwards": stats.forwards, "seconds": stats.seconds, "finish_reason": result.finish_reason,
        "room": min(room, settings.max_new_tokens),
    }  # fmt: skip


def figures(samples: Sequence[Mapping[str, Any]], max_new_tokens: int) -> dict[str, Any]:
    """Accuracy, its standard error, and speed: all tokens over all forwards and over all seconds.

    cut_off: answers that reached their length; unanswered: answers in which nothing was found; shortened: answers with less room
    than was asked for; too_long: prompts that left none.
    """
    n, right = len(samples), sum(bool(s["right"]) for s in samples)
    tokens, forwards, seconds = (sum(s[key] for s in samples) for key in ("tokens", "forwards", "seconds"))
    accuracy = right / max(1, n)
    return {
        "accuracy": accuracy, "stderr": math.sqrt(accuracy * (1 - accuracy) / max(1, n)), "n": n,
        "groups": _groups(samples), "tokens_per_forward": tokens / max(1, forwards),
        "tokens_per_second": tokens / max(1e-9, seconds), "tokens": tokens, "forwards": forwards, "seconds": seconds,
        "cut_off": sum(s["finish_reason"] == "length" for s in samples),
        "unanswered": sum(s["extracted"] is None for s in samples),
        "shortened": sum(0 < s["room"] < max_new_tokens for s in samples), "too_long": sum(s["room"] == 0 for s in samples),
    }  # fmt: skip


def _groups(samples: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Accuracy of each subject or part, where a benchmark has them."""
    verdicts: dict[str, list[bool]] = {}
    for sample in samples:
        if sample["group"]:
            verdicts.setdefault(sample["group"], []).append(bool(sample["right"]))
    return {name: {"accuracy": sum(v) / len(v), "n": len(v)} for name, v in sorted(verdicts.items())}


def table(report: Mapping[str, Any]) -> list[str]:
    """The report for people."""
    lines = [f"{report['model']} on {report['task']} ({report['data']}), method {report['method']}", ""]
    width = max([12, *(len(name) + 2 for name in report["groups"])])
    lines.append(f"{'':<{width}}{'accuracy':>10}{'items':>8}")
    for name, entry in report["groups"].items():
        lines.append(f"{name:<{width}}{entry['accuracy']:>10.3f}{entry['n']:>8}")
    lines += [f"{'all':<{width}}{report['accuracy']:>10.3f}{report['n']:>8}", ""]
    lines.append(
        f"standard error {report['stderr']:.3f}, {report['tokens_per_forward']:.2f} tokens per forward, "
        f"{report['tokens_per_second']:,.0f} tokens/s"
    )
    remarks = {
        "cut_off": "reached their length", "unanswered": "hold no answer",
        "shortened": "had less room than asked for, for want of context", "too_long": "prompts do not fit the context: wrong",
    }  # fmt: skip
    lines += [f"{report[key]} of {report['n']} {text}" for key, text in remarks.items() if report[key]]
    settings = " ".join(f"{name}={value}" for name, value in report["settings"].items())
    return [*lines, f"settings ({report['preset']}): {settings}", f"samples: {report['samples']}"]
