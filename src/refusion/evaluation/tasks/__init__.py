"""Benchmarks that others have published, read from the files in which they are published.

    word_problems.py   gsm8k          number after ####
    mathematics.py     math           \\boxed{}
    choice.py          arc-c, mmlu-pro, gpqa, aqua    a letter
    code.py            humaneval, mbpp                the published tests, in the sandbox
    phrases.py         bbh            what follows "the answer is"

Contract: `load` gives the items of a task, `TASKS[name].verdict` judges an answer. No file is fetched.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from refusion.config import UserError, nearest
from refusion.evaluation.tasks.base import Item, Record, Task, Verdict
from refusion.evaluation.tasks.choice import AQUA, ARC, GPQA, MMLU_PRO
from refusion.evaluation.tasks.code import HUMANEVAL, MBPP
from refusion.evaluation.tasks.files import find, records
from refusion.evaluation.tasks.mathematics import MATH
from refusion.evaluation.tasks.phrases import BBH
from refusion.evaluation.tasks.word_problems import GSM8K

__all__ = ["TASKS", "Item", "Record", "Task", "Verdict", "load", "task_named"]

TASKS = {task.name: task for task in (GSM8K, MATH, HUMANEVAL, MBPP, ARC, MMLU_PRO, GPQA, BBH, AQUA)}


def task_named(name: str) -> Task:
    """Raises `UserError` for a name that is none."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}; there is {', '.join(TASKS)}{nearest(name, TASKS)}")
    return TASKS[name]


def load(task: Task, path: Path | None, seed: int = 0) -> list[Item]:
    """All items of a file, or of a folder that holds it.

    Items that belong to groups (subjects, parts) are taken from the groups in turn, so that the first N speak for all.
    seed: of options that are shuffled. Raises `UserError` when there is no such file (it says what is wanted and where that is
    published), or when a record is broken.
    """
    wanted = f"{task.name} reads {task.form}, published at {task.url}"
    if path is None:
        raise UserError(f"--data is missing: {wanted}")
    files = find(path, task.files)
    if not files:
        raise UserError(f"no such file: {path} ({wanted})" if not path.is_dir() else f"nothing to read in {path}: {wanted}")
    items = [task.read(record, seed) for file in files for record in records(file)]
    if not items:
        raise UserError(f"{path}: no items ({wanted})")
    return _in_turn(task.choose(items))


def _in_turn(items: list[Item]) -> list[Item]:
    """One item of each group, then the next of each, and so on."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    rounds = itertools.zip_longest(*groups.values())
    return [item for row in rounds for item in row if item is not None]
