"""A recipe says everything, and what is wrong in it is said in one line."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from refusion.config import UserError
from refusion.methods.autoregressive import AutoregressiveObjective
from refusion.methods.base import TokenIds
from refusion.methods.block import BlockObjective
from refusion.methods.masked import MaskedObjective
from refusion.methods.refusion.corrupt import ReFusionObjective
from refusion.training.loop import make_objective
from refusion.training.recipe import ModelRecipe, ObjectiveRecipe, Recipe, ignored, load

RECIPES = Path(__file__).parent.parent / "recipes"
LEAST = '[objective]\nmethod = "refusion"\n[training]\nmax_steps = 10\n'
SECTIONS = {name: hint for name, hint in get_type_hints(Recipe).items() if is_dataclass(hint)}
KEYS = [(section, f.name) for section, kind in SECTIONS.items() for f in fields(kind)]


def write(path: Path, text: str) -> Path:
    file = path / "my.toml"
    file.write_text(text, encoding="utf-8")
    return file


def complaint(file: Path, **overrides: str) -> str:
    """The one line that comes of loading a wrong recipe; it names the file."""
    with pytest.raises(UserError) as caught:
        load(file, {key.replace("__", "."): value for key, value in overrides.items()})
    text = str(caught.value)
    assert "\n" not in text and "my.toml" in text and len(text) < 250
    return text


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_that_come_with_the_project_load(path: Path) -> None:
    recipe = load(path)
    assert recipe.name == path.stem
    made = make_objective(recipe.objective, TokenIds(3, (2,)))
    kinds = {"refusion": ReFusionObjective, "autoregressive": AutoregressiveObjective, "bd3lm": BlockObjective}
    assert isinstance(made, kinds.get(recipe.objective.method, MaskedObjective))


def test_the_least_recipe_has_the_papers_objective(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, LEAST))
    objective = make_objective(recipe.objective, TokenIds(3, (2,)))
    assert objective == ReFusionObjective(TokenIds(3, (2,)))  # no helps, all slot sizes alike, "count", means over targets
    assert objective.slot_sizes == (4, 8, 16, 32)
    assert recipe.model == ModelRecipe() and recipe.training.max_steps == 10


def test_every_setting_of_the_objective_arrives(tmp_path: Path) -> None:
    settings = {
        "slot_sizes": (2, 3), "slot_weights": (1.0, 2.5), "corruption": "bernoulli", "normalisation": "upstream", "mdm_scale": 0.5,
        "autoregressive_fraction": 0.1, "partial_slot_fraction": 0.2, "eos_fill": True, "unrolled_fraction": 0.3,
        "first_token_weight": 2.0,
    }  # fmt: skip
    toml = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    overrides = {f"objective.{k}": str(v).lower() if isinstance(v, bool) else str(v) for k, v in toml.items()}
    made = make_objective(load(write(tmp_path, LEAST), overrides).objective, TokenIds(3, (2,)))
    assert made == ReFusionObjective(TokenIds(3, (2,)), **settings)


@pytest.mark.parametrize("method", ["llada", "dream"])
def test_settings_of_masked_diffusion_arrive(method: str, tmp_path: Path) -> None:
    overrides = {"objective.method": method, "objective.answer_length": "24", "objective.context_p": "0.25"}
    recipe = load(write(tmp_path, LEAST), overrides)
    made = make_objective(recipe.objective, TokenIds(3, (2,)))
    assert made == MaskedObjective(TokenIds(3, (2,)), 24, *((True, 0.25) if method == "dream" else (False, 0.0)))
    assert ignored(recipe) == ([] if method == "dream" else ["objective.context_p"])
    assert recipe.objective.decoding == {"method": method, "max_new_tokens": 24}  # a model writes what it has learnt
    assert load(write(tmp_path, LEAST)).objective.decoding == {"method": "refusion"}


@pytest.mark.parametrize(("sizes", "taught"), [((8,), 8), ((16, 4, 8), 8), ((4, 8), 8)])
def test_block_diffusion_writes_blocks_of_a_size_that_it_has_learnt(sizes: tuple[int, ...], taught: int) -> None:
    recipe = ObjectiveRecipe(method="bd3lm", block_sizes=sizes)
    assert recipe.decoding == {"method": "bd3lm", "block_size": taught}


# --- overrides


def test_overrides(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, LEAST), {
        "training.max-steps": "7", "training.lr": "1e-3", "objective.slot_weights": "[1, 2, 3, 4]", "name": '"x"',
        "objective.slot-sizes": "[1,2,3,4]", "model.start": "some/folder", "objective.method": "autoregressive",
        "objective.prompt-loss": "true", "validation.every": "0", "training.clip": "2",
    })  # fmt: skip
    assert (recipe.training.max_steps, recipe.training.lr, recipe.training.clip) == (7, 1e-3, 2.0)
    assert recipe.objective.slot_weights == (1.0, 2.0, 3.0, 4.0) and recipe.objective.slot_sizes == (1, 2, 3, 4)
    assert all(isinstance(weight, float) for weight in recipe.objective.slot_weights)
    assert (recipe.model.start, recipe.objective.method, recipe.objective.prompt_loss) == ("some/folder", "autoregressive", True)
    assert (recipe.name, recipe.validation.every) == ("x", 0)


def test_an_override_can_be_all_there_is(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, ""), {"objective.method": "refusion", "training.max_steps": "3"})
    assert recipe.training.max_steps == 3


def test_wrong_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, 'name = "x"\n' + LEAST)
    assert "'training.max_step'" in complaint(file, training__max_step="3")
    assert "did you mean 'max_steps'" in complaint(file, training__max_step="3")
    assert "'name' is not a table" in complaint(file, name__what="3")
    assert "'max_steps' is not a table" in complaint(file, training__max_steps__what="3")
    assert "training must be a table, got 3" in complaint(file, training="3")
    assert "training.lr must be a number, got 'fast'" in complaint(file, training__lr="fast")
    assert "did you mean 'training'" in complaint(file, trainin__lr="1")


# --- keys


@pytest.mark.parametrize(("section", "key"), KEYS, ids=".".join)
def test_every_misspelt_key_is_named_with_the_nearest(section: str, key: str, tmp_path: Path) -> None:
    wrong = key + "z"
    text = complaint(write(tmp_path, LEAST), **{f"{section}__{wrong}": "1"})
    assert f"unknown key '{section}.{wrong}'; did you mean '{key}'?" in text


@pytest.mark.parametrize(("wrong", "right"), [
    ("objectiv", "objective"), ("trainings", "training"), ("dta", "data"), ("modl", "model"), ("validations", "validation"),
])  # fmt: skip
def test_a_misspelt_section_is_named_with_the_nearest(wrong: str, right: str, tmp_path: Path) -> None:
    assert f"unknown key '{wrong}'; did you mean '{right}'?" in complaint(write(tmp_path, f"{LEAST}[{wrong}]\n"))


def test_a_key_in_the_wrong_section_is_sent_home(tmp_path: Path) -> None:
    assert "did you mean 'training.batch_size'" in complaint(write(tmp_path, LEAST), data__batch_size="3")
    assert "did you mean 'objective.method'" in complaint(write(tmp_path, 'method = "refusion"\n'))


def test_missing_keys_are_named(tmp_path: Path) -> None:
    for text, key in (
        ("", "objective"), ('[objective]\nmethod = "refusion"\n', "training"),
        ("[objective]\n[training]\nmax_steps = 1\n", "objective.method"),
        ('[objective]\nmethod = "refusion"\n[training]\n', "training.max_steps"),
    ):  # fmt: skip
        assert f"missing key {key!r}" in complaint(write(tmp_path, text))


@pytest.mark.parametrize(("section", "key"), KEYS, ids=".".join)
@pytest.mark.parametrize("value", ["{ a = 1 }", "[[1]]", "1979-05-27", "true", '"x"', "1.5", "-1", "nan"])
def test_every_wrongly_typed_value_is_named(section: str, key: str, value: str, tmp_path: Path) -> None:
    """No value at all gives anything but a recipe or one line with the key."""
    hint = get_type_hints(SECTIONS[section])[key]
    fine = {"true": bool, '"x"': str, "1.5": float}.get(value)
    if fine is not None and fine.__name__ in str(hint):
        return
    text = complaint(write(tmp_path, LEAST), **{f"{section}__{key}": value})
    assert f"{section}.{key} must" in text


# --- values


@pytest.mark.parametrize(("key", "value", "message"), [
    ("objective.method", "refuson", "must be one of refusion, autoregressive, llada, dream, bd3lm, got 'refuson'; did you mean"),
    ("objective.corruption", "bernouli", "did you mean 'bernoulli'?"),
    ("objective.normalisation", "target", "did you mean 'targets'?"),
    ("training.optimizer", "adam", "did you mean 'adamw'?"),
    ("training.schedule", "cosin", "did you mean 'cosine'?"),
    ("data.suite", "nanno", "did you mean 'nano'?"),
    ("training.max_steps", "0", "at least 1, got 0"),
    ("training.batch_size", "0", "at least 1, got 0"),
    ("training.micro_batch_size", "0", "at least 1, got 0"),
    ("training.save_every", "-5", "at least 1, got -5"),
    ("training.log_every", "0", "at least 1, got 0"),
    ("training.threads", "0", "at least 1, got 0"),
    ("training.seed", "-1", "at least 0, got -1"),
    ("training.lr", "0", "greater than 0, got 0.0"),
    ("training.lr", "nan", "finite number of at least 0, got nan"),
    ("training.lr", "inf", "finite number of at least 0, got inf"),
    ("training.lr", "-1", "finite number of at least 0, got -1.0"),
    ("training.clip", "-1", "finite number of at least 0"),
    ("training.beta2", "1", "less than 1"),
    ("training.decay_fraction", "1.5", "between 0 and 1, got 1.5"),
    ("training.min_lr_ratio", "-0.1", "between 0 and 1, got -0.1"),
    ("training.warmup_steps", "-1", "at least 0, got -1"),
    ("data.rows_per_family", "0", "at least 1, got 0"),
    ("data.infill_fraction", "1.01", "between 0 and 1, got 1.01"),
    ("data.vocabulary", "100", "at least 300"),
    ("model.hidden_size", "0", "at least 1, got 0"),
    ("model.head_dim", "7", "must be even, got 7"),
    ("model.num_key_value_heads", "3", "must be a multiple of num_key_value_heads"),
    ("objective.slot_sizes", "[]", "must not be empty"),
    ("objective.slot_sizes", "[4, 0]", "at least 1, got 0"),
    ("data.family_weights", "[1, -2]", "at least 0, got -2.0"),
    ("objective.unrolled_fraction", "2.0", "between 0 and 1, got 2.0"),
    ("objective.slot_weights", "[1, 2]", "one entry for each of slot_sizes"),
    ("objective.slot_weights", "[0, 0, 0, 0]", "not all of them 0"),
    ("objective.slot_weights", "[1, -1, 1, 1]", "at least 0, got -1.0"),
    ("objective.mdm_scale", "-1", "at least 0, got -1.0"),
    ("objective.autoregressive_fraction", "2", "between 0 and 1, got 2.0"),
    ("objective.answer_length", "0", "at least 1, got 0"),
    ("objective.context_p", "1.5", "between 0 and 1, got 1.5"),
    ("validation.rows", "0", "at least 1, got 0"),
    ("validation.decode_limit", "0", "at least 1, got 0"),
    ("validation.every", "-1", "at least 0, got -1"),
])  # fmt: skip
def test_values_out_of_range_are_named(key: str, value: str, message: str, tmp_path: Path) -> None:
    text = complaint(write(tmp_path, LEAST), **{key.replace(".", "__"): value})
    assert message in text and key.split(".")[1] in text


@pytest.mark.parametrize(("section", "key"), KEYS, ids=".".join)
@pytest.mark.parametrize("value", ["1" + "0" * 30, "0x" + "f" * 5000, "1e300", "[1e300]", "[1" + "0" * 400 + "]"])
def test_every_absurdly_large_number_is_named(section: str, key: str, value: str, tmp_path: Path) -> None:
    hint = str(get_type_hints(SECTIONS[section])[key])
    text = complaint(write(tmp_path, LEAST), **{f"{section}__{key}": value})
    assert f"{section}.{key} must" in text
    kind = "float" if "e" in value else "int"
    if ("tuple" in hint) == value.startswith("[") and (kind in hint or "float" in hint) and "x" not in value:
        assert f"{section}.{key} must be at most " in text or "between 0 and 1" in text


@pytest.mark.parametrize(("key", "most"), [
    ("training.max_steps", 10**9), ("data.rows_per_family", 10**8), ("training.batch_size", 10**6),
    ("model.hidden_size", 2**20), ("training.seed", 2**63 - 1), ("validation.rows", 10**7), ("training.threads", 1024),
    ("training.lr", 1e9),
])  # fmt: skip
def test_limits_are_named_and_can_be_reached(key: str, most: float, tmp_path: Path) -> None:
    file = write(tmp_path, LEAST)
    load(file, {key: str(most)})
    assert f"{key} must be at most {10**9 if most == 1e9 else most:,}, got" in complaint(file, **{key: str(most * 2)})


def test_numbers_and_tables_that_toml_cannot_hold(tmp_path: Path) -> None:
    digits = "1" * 5000
    assert "my.toml:" in complaint(write(tmp_path, LEAST + f"batch_size = {digits}\n"))
    assert "training.batch_size must be a whole number" in complaint(write(tmp_path, LEAST), training__batch_size=digits)
    assert "my.toml:" in complaint(write(tmp_path, f"a = {'[' * 100_000}\n"))
    assert "training.batch_size must" in complaint(write(tmp_path, LEAST), training__batch_size="[" * 100_000)


# --- files


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    assert "no such recipe" in complaint(tmp_path / "my.toml")
    assert "my.toml:" in complaint(write(tmp_path, "[objective\n"))
    assert "line 2" in complaint(write(tmp_path, "a = 1\nb =\n"))
    (tmp_path / "my.toml").write_bytes(b"name = '\xff'\n")
    assert "my.toml:" in complaint(tmp_path / "my.toml")
    (tmp_path / "my.toml").unlink()
    (tmp_path / "my.toml").mkdir()
    assert "directory" in complaint(tmp_path / "my.toml")


def test_long_values_do_not_make_long_lines(tmp_path: Path) -> None:
    complaint(write(tmp_path, LEAST + f"lr = {[1] * 1000}\n"))
    values: Any = '"""a\nb"""'
    assert "'a\\nb'" in complaint(write(tmp_path, LEAST + f"lr = {values}\n"))
