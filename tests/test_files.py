"""Training data from files: what is wrong is named with file and line; what is too long is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refusion.config import UserError
from refusion.models.tokenizer import Tokenizer
from refusion.training import files, loop, recipe

FOLDER = Path(__file__).parent / "cases" / "decode" / "trained"
ROWS = [json.loads(line) for line in (FOLDER.parent / "trained.jsonl").read_text().splitlines()]


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def good(count: int, start: int = 0) -> list[str]:
    return [json.dumps({"prompt": r["prompt"], "response": r["response"]}) for r in ROWS[start : start + count]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "object"),
        ('{"prompt": "a"}', "'response'"),
        ('{"response": "a"}', "'prompt'"),
        ('{"prompt": "a", "response": 3}', "'response'"),
        ('{"prompt": "a", "response": " "}', "'response' is empty"),
        ('{"prompt": "", "response": "b"}', "'prompt' is empty"),
        ('{"prompt": "a\\ud800b", "response": "b"}', "surrogate"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "rows.jsonl", *good(2), "", line)
    with pytest.raises(UserError) as caught:
        list(files.read(Path(path)))
    assert str(caught.value).startswith(f"{path}:4: ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", '{"prompt": "a\u2028b\u0085c", "response": "d"}', "{")
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not JSON"):
        list(files.read(Path(path)))


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(FOLDER)
    with pytest.raises(UserError, match=r"no such data file: .*none\.jsonl"):
        list(files.read(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="no rows"):
        files.rows(tokenizer, 3, [write(tmp_path / "empty.jsonl")], 512, tmp_path, "train")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.jsonl"):
        list(files.read(tmp_path / "binary.jsonl"))


def test_rows_are_templated_ended_and_counted(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(FOLDER)
    path = write(tmp_path / "rows.jsonl", *good(20))
    store, dropped = files.rows(tokenizer, 3, [path], 512, tmp_path / "cache", "train")
    assert (len(store), dropped) == (20, 0)
    prompt, answer = store.pair(0)
    assert prompt.tolist() == ROWS[0]["prompt_ids"]
    assert answer[-1] == 3
    lengths = sorted(store.lengths.tolist())
    short, dropped = files.rows(tokenizer, 3, [path], lengths[9], tmp_path / "cache", "train")
    assert dropped == sum(length > lengths[9] for length in lengths) and len(short) + dropped == 20
    with pytest.raises(UserError, match="longer than the context"):
        files.rows(tokenizer, 3, [path], 3, tmp_path / "cache", "train")


def tiny(tmp_path: Path, **more: str) -> recipe.Recipe:
    train = write(tmp_path / "train.jsonl", *good(30))
    validation = write(tmp_path / "validation.jsonl", *good(8, 30))
    text = f"""
[data]
train = ["{train}"]
validation = ["{validation}"]
[model]
start = "{FOLDER}"
[objective]
method = "refusion"
[training]
max_steps = 2
batch_size = 4
[validation]
every = 2
"""
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    return recipe.load(tmp_path / "recipe.toml", more)


def test_a_model_is_trained_on_files(tmp_path: Path) -> None:
    run = loop.train(tiny(tmp_path), tmp_path / "run")
    assert run.step == 2 and len(run.batches.store) == 30
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("validation_loss_mdm" in record for record in records)


def test_a_folder_is_held_by_one_process(tmp_path: Path) -> None:
    with loop._alone(tmp_path), pytest.raises(UserError, match="in use"), loop._alone(tmp_path):
        pass
    with loop._alone(tmp_path):
        pass


def test_settings_without_effect_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tiny(tmp_path, **{"objective.prompt_loss": "true"})
    assert recipe.ignored(given) == ["objective.prompt_loss"]
    loop.train(given, tmp_path / "run")
    assert "objective.prompt_loss has no effect" in capsys.readouterr().err


def test_files_come_in_twos_and_need_a_model(tmp_path: Path) -> None:
    tiny(tmp_path)
    path = tmp_path / "recipe.toml"
    path.write_text(path.read_text().replace("validation = [", "#"), encoding="utf-8")
    with pytest.raises(UserError, match=r"data\.validation"):
        recipe.load(path)
    tiny(tmp_path)
    path.write_text(path.read_text().replace("start =", "# start ="), encoding="utf-8")
    with pytest.raises(UserError, match=r"model\.start"):
        recipe.load(path)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    (out / "best").mkdir(parents=True)
    (out / "best" / "photo.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match="not empty"):
        loop.train(tiny(tmp_path), out)
    assert (out / "best" / "photo.jpg").exists()


def test_ends_and_settings_travel_with_the_model(tmp_path: Path) -> None:
    """Several end-of-sequence ids, and decoding defaults, are those of the folder that was started from."""
    import shutil

    from refusion.models.checkpoint import read_config

    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    content = {"eos_token_id": [3, 0], "refusion": {"slot_size": 5}}
    (folder / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    loop.train(tiny(tmp_path, **{"model.start": json.dumps(str(folder))}), tmp_path / "run")
    saved = read_config(tmp_path / "run" / "last")
    assert saved.eos_token_ids == (3, 0)
    assert saved.defaults == {"method": "refusion", "slot_size": 5}
