"""The comparison from base to report: on a model of a few thousand weights, which solves nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from refusion import reproduce
from refusion.config import UserError
from refusion.evaluation import report
from refusion.models.checkpoint import save_folder
from refusion.models.transformer import ModelConfig, Transformer
from refusion.reproduce import kept, load_plan, run, shortened
from refusion.training import loop, suite

PLAN = """
name = "test"
base = "{base}"

[data]
rows_per_family = 10
infill_fraction = 0.1

[training]
max_steps = 3
batch_size = 8
threads = 1

[budget]
validation = 1
test = 1
speed = 1
repeats = 1

[methods.refusion.objective]
slot_sizes = [4, 8]
eos_fill = true
[methods.refusion.search]
max_new_tokens = [8]
slot_size = [4, 8]
block_size = [4, 8]

[methods.no-help]
method = "refusion"
group = "helps"
training = { max_steps = 2 }
[methods.no-help.search]
max_new_tokens = [8]

[methods.autoregressive.search]
max_new_tokens = [8]

[methods.by-mean]
model = "refusion"
search = { max_new_tokens = [8], slot_score = ["mean"] }

[[ablations]]
name = "left to right"
of = "refusion"
settings = { slot_order = "left_to_right" }
"""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = suite.learn_tokenizer(330, 0, per_family=20)
    config = ModelConfig("qwen3", tokenizer.vocab_size, 16, 24, 2, 2, 1, 8, qk_norm=True)
    model = Transformer(config).initialize(torch.Generator().manual_seed(0))
    return save_folder(tmp_path_factory.mktemp("models") / "start", model, tokenizer)


def plan_file(folder: Path, base: Path | str, text: str = PLAN) -> Path:
    path = folder / "plan.toml"
    path.write_text(text.replace("{base}", str(base)))
    return path


@contextmanager
def silent(label: str) -> Iterator[reproduce.Progress]:
    yield lambda done, total, note: None


def test_from_base_to_report_and_again_without_work(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, out = load_plan(plan_file(tmp_path, base)), tmp_path / "out"
    table = run(plan, out, progress=silent)
    assert table is not None and json.loads((out / "table.json").read_text())["rows"] == json.loads(json.dumps(table))["rows"]
    chosen = {row["entry"]: row for row in table["rows"] if row["chosen"]}
    assert list(chosen) == ["refusion", "no-help", "autoregressive", "by-mean"]
    assert [row["method"] for row in chosen.values()] == ["refusion", "refusion", "autoregressive", "refusion"]
    assert chosen["by-mean"]["settings"]["slot_score"] == "mean" and not (out / "train" / "by-mean").exists()
    seen = {name: row["train_tokens"] for name, row in chosen.items()}
    assert seen["refusion"] == seen["autoregressive"] > seen["no-help"] > 0
    assert [(a["name"], a["settings"]["slot_order"]) for a in table["ablations"]] == [
        ("as chosen", "confidence"), ("left to right", "left_to_right"),
    ]  # fmt: skip
    text = (out / "report" / "report.md").read_text()
    assert "| refusion | left to right |" in text and text.index("| no-help |") > text.index("## Ablations of training")
    assert chosen["refusion"]["tried"] == 3, "a block smaller than its slot is no setting"
    assert all(row["n"] == 7 and row["settings"]["max_new_tokens"] == 8 for row in table["rows"])
    assert all(row["rows_per_token"] > 0 and row["tokens_per_second"] > 0 for row in chosen.values())
    assert "![sudoku](order-sudoku.svg)" in text
    for name in ("report.md", "report.html", "plane.svg", "families.svg", "order-word.svg", "order-sudoku.svg"):
        assert (out / "report" / name).stat().st_size > 500
    steps: list[Any] = []
    for owner, name in ((reproduce, "evaluate"), (reproduce.bench, "run"), (loop.Run, "advance")):
        monkeypatch.setattr(owner, name, lambda *x, **y: steps.append(x))
    assert run(plan, out, progress=silent) == table and not steps


def test_every_method_sees_the_same_rows_in_the_same_order(base: Path, tmp_path: Path) -> None:
    plan = load_plan(plan_file(tmp_path, base))
    recipes = [entry.recipe for entry in plan.entries]
    assert len({(r.data, r.training, r.model) for r in (recipes[0], recipes[2])}) == 1
    assert recipes[1].training == replace(recipes[0].training, max_steps=2) and recipes[1].data == recipes[0].data
    assert [r.objective.method for r in recipes] == ["refusion", "refusion", "autoregressive", "refusion"]
    assert {e.recipe.training.max_steps for e in shortened(plan, 2).entries} == {2}


def test_training_that_was_stopped_goes_on(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, out = load_plan(plan_file(tmp_path, base)), tmp_path / "out"
    train = loop.train
    monkeypatch.setattr(loop, "train", lambda recipe, *x, **y: train(shortened(plan, 1).entries[0].recipe, *x, **y))
    assert run(plan, out, progress=silent) is None and not (out / "table.json").exists()
    monkeypatch.undo()
    assert run(plan, out, progress=silent) is not None


@pytest.mark.parametrize(("old", "new", "message"), [
    ('base = "{base}"', "", "missing key 'base'"), ("[budget]", "[bugdet]", "unknown key 'bugdet'; did you mean 'budget'"),
    ("repeats = 1", "repaets = 1", "budget"),
    ("methods.no-help]\nmethod = \"refusion\"", "methods.no-help]", "unknown method 'no-help'"),
    ("slot_size = [4, 8]", "slot_sizs = [4, 8]", "unknown setting 'slot_sizs'; did you mean 'slot_size'"),
    ("slot_size = [4, 8]", "slot_size = 4", "search.slot_size must be a list"),
    ("eos_fill = true", "eos_fil = true", "unknown key 'objective.eos_fil'"), ("[data]", "[data", "plan.toml: "),
    ("max_steps = 3", "max_steps = 0", "max_steps must be at least 1"),
    ('of = "refusion"', 'of = "refushion"', "unknown method 'refushion'"),
    ('model = "refusion"', 'model = "refushion"', "unknown model 'refushion'; did you mean 'refusion'"),
    ('model = "refusion"', 'model = "by-mean"', "unknown model 'by-mean'"),
    ('model = "refusion"', 'model = "refusion"\ntraining = {}', "training is that of 'refusion'"),
    ("[methods.refusion.search]", "[methods.refusion.serch]", "unknown key 'serch'; did you mean 'search'"),
    ("slot_order =", "slot_ordr =", "unknown setting 'slot_ordr'"), ('name = "left to right"', "", "missing key 'name'"),
])  # fmt: skip
def test_mistakes_in_a_plan(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in PLAN
    with pytest.raises(UserError) as caught:
        load_plan(plan_file(tmp_path, "nano-ar", PLAN.replace(old, new)))
    assert message in str(caught.value) and "plan.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_the_projects_own_plan_loads() -> None:
    plan = load_plan(Path(__file__).parent.parent / "recipes" / "reproduce" / "nano.toml")
    assert {"autoregressive", "refusion", "bd3lm", "llada", "dream"} == {entry.method for entry in plan.entries}
    assert all(entry.settings for entry in plan.entries)
    helps = load_plan(Path(__file__).parent.parent / "recipes" / "reproduce" / "nano-helps.toml")
    assert {entry.method for entry in helps.entries} == {"refusion"} and len(helps.entries) == 5


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml"):
        load_plan(tmp_path / "none.toml")


# --- the report


def row(entry: str, accuracy: float, speed: float, chosen: bool = True, method: str = "") -> dict[str, Any]:
    return {
        "entry": entry, "method": method or entry, "group": "", "chosen": chosen, "accuracy": accuracy, "stderr": 0.01, "n": 70,
        "train_tokens": 1234, "tokens_per_forward": 2.0, "tokens_per_second": speed, "given": {"slot_size": 8},
        "families": {"word": {"accuracy": accuracy}, "code": {"accuracy": 1.0}},
    }  # fmt: skip


TABLE = {"name": "<b>x</b>", "rows": [
    row("refusion", 0.8, 300), row("refusion", 0.6, 500, False), row("refusion", 0.7, 200, False), row("autoregressive", 0.9, 100),
]}  # fmt: skip


def test_the_front_holds_what_nothing_beats() -> None:
    assert [r["tokens_per_second"] for r in report.front(TABLE["rows"][:3])] == [300, 500]
    assert report.front(TABLE["rows"]) == [TABLE["rows"][3], TABLE["rows"][0], TABLE["rows"][1]]
    assert report.area(TABLE["rows"][:3]) == pytest.approx(300 * 0.8 + 200 * 0.6)
    assert report.area([]) == 0


@pytest.mark.parametrize(("most", "expected"), [(1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])])
def test_both_ends_of_a_front_are_kept_first(most: int, expected: list[int]) -> None:
    assert kept([{"x": x} for x in range(5)], most) == [{"x": x} for x in expected]


def test_the_report_has_every_chosen_line_and_its_ratio(tmp_path: Path) -> None:
    report.write(TABLE, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| refusion | 0.800 ± 0.010 | 2.00 |  | 300 (300-300) | 3.00 | 360 | slot_size 8 |" in text
    assert "| autoregressive | 0.900 ± 0.010 |" in text and "| refusion | 0.80 | 1.00 |" in text and "1,234 tokens" in text
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;x" in page and "<b>x" not in page and page.count("data:image/svg+xml;base64,") == 2
    assert "http://" not in page and "https://" not in page
    assert b"<svg" in (tmp_path / "plane.svg").read_bytes()

