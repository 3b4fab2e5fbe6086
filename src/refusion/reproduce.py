"""`refusion reproduce`: the paper's controlled comparison, from one autoregressive base to the report.

Stages, each skipped when its result is there already (so a run that was stopped goes on where it was):

    train/METHOD     every method, autoregression included, continues from the base on the same rows for the same steps
    search           every setting of every method on the validation split; what no other setting beats is kept
    test             the kept settings on the test split
    speed            the most accurate setting of every method, all in turn on the same prompts (evaluation.bench)
    ablations        the chosen setting of a method with one thing changed, all in turn on the same prompts
    report           evaluation.report

Contract: no method is treated better than another: rows, steps, optimizer and search are the same, and settings are chosen
without a look at the test split. Results are plain JSON files in the run's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from refusion.config import CONFIGS, GenerationConfig, UserError, nearest
from refusion.evaluation import bench, picture, procedural, report
from refusion.evaluation.evaluate import evaluate
from refusion.generate import Model, load
from refusion.training import loop
from refusion.training.recipe import Recipe, from_table

TIMED = ("tokens_per_second", "tokens_per_second_interval", "rows_per_token", "first_commit_seconds", "peak_memory_bytes")
MEASURED = ("accuracy", "stderr", "n", "tokens_per_forward", "tokens_per_second", "settings", "families")


@dataclass(frozen=True)
class Budget:
    """How much is measured: tasks of each family."""

    validation: int = 10
    test: int = 100
    front: int = 3  # settings of each method's front that are tested: the most accurate, the fastest, and others evenly between
    speed: int = 5
    ablation: int = 15
    repeats: int = 3


@dataclass(frozen=True)
class Entry:
    """One line of the comparison: a method's training, and the settings that are searched."""

    name: str
    method: str
    recipe: Recipe
    settings: tuple[dict[str, Any], ...]
    group: str = ""  # what it is an ablation of; it stands in a table of its own and trains for as long as that table's others
    model: str = ""  # the entry whose trained model it decodes otherwise; none: its own

    @property
    def trained(self) -> str:
        """The folder of its model."""
        return self.model or self.name


@dataclass(frozen=True)
class Ablation:
    """The entry `of` at its chosen setting, with these settings changed."""

    name: str
    of: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    name: str
    entries: tuple[Entry, ...]
    budget: Budget
    ablations: tuple[Ablation, ...] = ()


def load_plan(path: Path) -> Plan:
    """Read a plan: `base`, [data] and [training] as in a recipe, [budget], and for each method [methods.NAME.objective] and
    [methods.NAME.search], lists of values whose combinations are all tried. NAME is the method, or has `method = "..."`. With
    `group`, it is an ablation of training, and [methods.NAME.training] may make it short. With `model = "OTHER"`, the model of
    that entry is decoded at other settings. [[ablations]]: see `Ablation`.

    Raises `UserError` naming file and key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    known = ("name", "base", "data", "training", "budget", "methods", "ablations")
    for key in table:
        if key not in known:
            raise UserError(f"{path}: unknown key {key!r}{nearest(key, known)}")
    for key in ("base", "training", "methods"):
        if key not in table:
            raise UserError(f"{path}: missing key {key!r}")
    entries = tuple(_entry(path, table, name) for name in table["methods"])
    try:
        budget = Budget(**table.get("budget", {}))
    except TypeError as error:
        raise UserError(f"{path}: budget: {error}") from None
    ablations = tuple(_ablation(path, part, entries) for part in table.get("ablations", []))
    return Plan(str(table.get("name", path.stem)), entries, budget, ablations)


def _ablation(path: Path, part: Mapping[str, Any], entries: tuple[Entry, ...]) -> Ablation:
    methods = {entry.name: entry.method for entry in entries}
    where = f"{path}: ablations"
    for key in ("name", "of", "settings"):
        if key not in part:
            raise UserError(f"{where}: missing key {key!r} in {dict(part)!r:.80}")
    if part["of"] not in methods:
        raise UserError(f"{where}: unknown method {part['of']!r}{nearest(str(part['of']), methods)}")
    config = CONFIGS[methods[part["of"]]]
    for key in part["settings"]:
        if key not in config.__dataclass_fields__:
            raise UserError(f"{where}: unknown setting {key!r}{nearest(key, config.__dataclass_fields__)}")
    return Ablation(str(part["name"]), part["of"], dict(part["settings"]))


PARTS = ("method", "model", "group", "objective", "training", "search")  # of [methods.NAME]


def _entry(path: Path, table: Mapping[str, Any], name: str) -> Entry:
    where, part = f"{path}: methods.{name}", table["methods"][name]
    for key in part:
        if key not in PARTS:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, PARTS)}")
    if "model" in part:
        return _other_decoding(path, table, name, part)
    method = part.get("method", name)
    if method not in CONFIGS:
        raise UserError(f"{where}: unknown method {method!r}; there is {', '.join(CONFIGS)}{nearest(method, CONFIGS)}")
    recipe = from_table({
        "name": name, "data": table.get("data", {}), "model": {"start": table["base"]},
        "training": {**table["training"], **part.get("training", {})},
        "objective": {"method": method, **part.get("objective", {})}, "validation": {"every": 500},
    }, where)  # fmt: skip
    return Entry(name, method, recipe, _settings(where, method, part.get("search", {})), str(part.get("group", "")))


def _other_decoding(path: Path, table: Mapping[str, Any], name: str, part: Mapping[str, Any]) -> Entry:
    """An entry that trains nothing."""
    where = f"{path}: methods.{name}"
    owners = [owner for owner, other in table["methods"].items() if "model" not in other]
    if part["model"] not in owners:
        raise UserError(f"{where}: unknown model {part['model']!r}{nearest(str(part['model']), owners)}")
    for key in ("objective", "training", "method"):
        if key in part:
            raise UserError(f"{where}: {key} is that of {part['model']!r}, whose model this is")
    owner = _entry(path, table, part["model"])
    settings = _settings(where, owner.method, part.get("search", {}))
    return replace(owner, name=name, settings=settings, group=str(part.get("group", owner.group)), model=owner.name)


def _settings(where: str, method: str, search: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """All combinations of a search's values that fit together."""
    config = CONFIGS[method]
    for key, values in search.items():
        if key not in config.__dataclass_fields__:
            raise UserError(f"{where}: unknown setting {key!r}{nearest(key, config.__dataclass_fields__)}")
        if not isinstance(values, list):
            raise UserError(f"{where}: search.{key} must be a list, got {values!r}")
    combinations = [dict(zip(search, values, strict=True)) for values in product(*search.values())]
    return tuple(s for s in combinations if _valid(config, s))


def _valid(config: Any, settings: dict[str, Any]) -> bool:
    """Combinations that do not fit together (a block smaller than its slot) are left out."""
    try:
        config(**settings).resolve()
    except UserError:
        return False
    return True


# --- the stages


def run(plan: Plan, out: Path, *, device: str = "cpu", progress: Callable[[str], Any]) -> dict[str, Any] | None:
    """All stages. progress(label): a context manager that hands out a `Progress` for one stage.

    Returns the table, or None when training was stopped (Ctrl-C) and waits to be resumed.
    """
    out.mkdir(parents=True, exist_ok=True)
    for entry in plan.entries:
        if not entry.model and not _train(entry, out / "train" / entry.name, device, progress):
            return None
    models = {entry.name: load(out / "train" / entry.trained / "last", device) for entry in plan.entries}
    for name, model in models.items():
        model.name = name
    rows = []
    for entry in plan.entries:
        found = _search(entry, models[entry.name], plan.budget, out, progress)
        rows += _test(entry, models[entry.name], found, plan.budget, out, progress)
    _speed(plan, models, rows, out, progress)
    table = {"name": plan.name, "rows": rows, "ablations": _ablations(plan, models, rows, out, progress)}
    _write(out / "table.json", table)
    report.write(table, out / "report", _orders(plan, models, rows))
    return table


def _train(entry: Entry, folder: Path, device: str, progress: Any) -> bool:
    steps = entry.recipe.training.max_steps
    with progress(f"train {entry.name}") as shown:
        done = loop.train(entry.recipe, folder, resume=(folder / "recipe.json").exists(), device=device, progress=shown)
    return done.step >= steps


def _search(entry: Entry, model: Model, budget: Budget, out: Path, progress: Any) -> list[dict[str, Any]]:
    """Every setting on the validation split; returns those on the front of accuracy and speed."""
    tried = []
    with progress(f"search {entry.name}") as shown:
        for number, settings in enumerate(entry.settings):
            tried.append(_measured(entry, model, settings, "validation", budget.validation, out))
            shown(number + 1, len(entry.settings), "")
    return kept(report.front(tried), budget.front)


def kept(front: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many of a front: its most accurate end first, then the fastest, then what lies evenly between.

    >>> [one["x"] for one in kept([{"x": x} for x in range(7)], 3)]
    [0, 3, 6]
    """
    if len(front) <= most:
        return front
    return front[:1] if most == 1 else [front[round(i * (len(front) - 1) / (most - 1))] for i in range(most)]


def _test(
    entry: Entry, model: Model, found: list[dict[str, Any]], budget: Budget, out: Path, progress: Any
) -> list[dict[str, Any]]:
    """The kept settings on the test split, the one that was most accurate in validation first."""
    rows = []
    ordered = sorted(found, key=lambda one: (-one["accuracy"], -one["tokens_per_second"]))
    with progress(f"test {entry.name}") as shown:
        for number, one in enumerate(ordered):
            result = _measured(entry, model, one["given"], "test", budget.test, out)
            rows.append({
                "entry": entry.name, "method": entry.method, "group": entry.group, "chosen": number == 0,
                "parameters": model.folder.parameters,
                "train_tokens": _data_tokens(entry, out), "train_seconds": _train_seconds(out / "train" / entry.trained),
                **{key: result[key] for key in MEASURED},
                "given": one["given"], "validation_accuracy": one["accuracy"], "tried": len(entry.settings),
            })  # fmt: skip
            shown(number + 1, len(ordered), "")
    return rows


def _speed(plan: Plan, models: Mapping[str, Model], rows: list[dict[str, Any]], out: Path, progress: Any) -> None:
    """Times of all that was tested (of the small runs of groups, of their chosen settings), measured in turn; they replace those of
    the test, where each method ran by itself."""
    compared = [row for row in rows if row["chosen"] or not row["group"]]
    entries = [(models[row["entry"]], CONFIGS[row["method"]](**row["given"])) for row in compared]
    measured = _in_turn("speed", entries, plan.budget.speed, plan.budget.repeats, out, progress)
    for row, timed in zip(compared, measured, strict=True):
        row |= {key: timed[key] for key in TIMED}


def _ablations(
    plan: Plan, models: Mapping[str, Model], rows: list[dict[str, Any]], out: Path, progress: Any
) -> list[dict[str, Any]]:
    """The chosen settings as they are, and each with one thing changed."""
    given = {row["entry"]: row["given"] for row in rows if row["chosen"]}
    methods = {entry.name: entry.method for entry in plan.entries}
    wanted = [Ablation("as chosen", of, {}) for of in dict.fromkeys(a.of for a in plan.ablations)] + list(plan.ablations)
    if not wanted:
        return []
    entries = [(models[a.of], CONFIGS[methods[a.of]](**{**given[a.of], **a.settings})) for a in wanted]
    measured = _in_turn("ablations", entries, plan.budget.ablation, 1, out, progress)
    return [{"name": a.name, "of": a.of, "changed": a.settings, **row} for a, row in zip(wanted, measured, strict=True)]


PICTURED = ("word", "record", "sudoku", "code")  # families whose first task of the test split is shown


def _orders(plan: Plan, models: Mapping[str, Model], rows: list[dict[str, Any]]) -> dict[str, str]:
    """Pictures of the order in which the first entry with slots wrote its answers, by family."""
    row = next((row for row in rows if row["chosen"] and row["method"] == "refusion" and not row["group"]), None)
    if row is None:
        return {}
    model, config = models[row["entry"]], CONFIGS["refusion"](**row["given"])
    items = {family: procedural.take(family, "test", 1)[0] for family in PICTURED}
    return {
        family: picture.order(item.prompt, model.generate(item.prompt, config), model.tokenizer.decode)
        for family, item in items.items()
    }


def _in_turn(
    name: str, entries: list[tuple[Model, GenerationConfig]], limit: int, repeats: int, out: Path, progress: Any
) -> list[dict[str, Any]]:
    """Rows of a bench, or what was measured of it before."""
    stamp = _stamp([[model.name, config.to_dict()] for model, config in entries], limit, repeats)
    found = _read(out / f"{name}.json", stamp)
    if found is None:
        contestants = [bench.Contestant(model, config) for model, config in entries]
        with progress(name) as shown:
            found = bench.run(contestants, limit=limit, repeats=repeats, progress=shown)
        _write(out / f"{name}.json", {"stamp": stamp, **found})
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def _measured(
    entry: Entry, model: Model, settings: dict[str, Any], split: str, limit: int, out: Path
) -> dict[str, Any]:
    """One evaluation, or what was measured of it before."""
    stamp = _stamp(entry.method, settings, split, limit, asdict(entry.recipe))
    path = out / split / f"{entry.name}-{stamp}.json"
    found = _read(path, stamp)
    if found is None:
        found = evaluate(model, split=split, limit=limit, config=CONFIGS[entry.method](**settings))
        found |= {"stamp": stamp, "given": settings}
        _write(path, found)
    return found


# --- files


def _data_tokens(entry: Entry, out: Path) -> int:
    """Tokens of prompts and answers that a run has seen, the same for every method: how often a method writes them into a
    row is its own affair."""
    run = loop.Run(entry.recipe, out / "train" / entry.trained, resume=True)
    batches = run.batches
    return int(sum(batches.store.lengths[batches.rows_of(step)].sum() for step in range(run.step)))


def _train_seconds(folder: Path) -> float:
    """Seconds of training, from tokens and tokens a second as they were logged."""
    seconds, before = 0.0, 0
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "tokens_per_second" in record:
            seconds += (record["tokens"] - before) / max(1e-9, record["tokens_per_second"])
            before = record["tokens"]
    return seconds


def _stamp(*parts: Any) -> str:
    """A short name for what a result depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _read(path: Path, stamp: str) -> dict[str, Any] | None:
    """A result that was written before; none if it is missing, broken or of something else."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("stamp") == stamp else None


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def shortened(plan: Plan, steps: int) -> Plan:
    """The same plan with fewer training steps, to see that all stages work."""
    entries = tuple(
        replace(e, recipe=replace(e.recipe, training=replace(e.recipe.training, max_steps=steps))) for e in plan.entries
    )
    return replace(plan, entries=entries)
