"""Training data from files: what is wrong is named with file and line; what is too long is counted."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from refusion.config import UserError
from refusion.models.tokenizer import Tokenizer
from refusion.training import files, loop, recipe, shards
from refusion.training.data import Mixture
from refusion.training.files import Row
from refusion.training.shards import Encoding, Report

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
        ('{"response": "a"}', "must have the fields prompt and response, query"),
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


def encoding(context: int = 512, too_long: str = "drop", vocab_size: int = 1_000_000) -> Encoding:
    return Encoding(Tokenizer.from_folder(FOLDER), 3, context, vocab_size, too_long)


def only(path: str, cache: Path, given: Encoding) -> tuple[Mixture, Report]:
    rows, (report,) = shards.shards([path], None, given, cache, "train")
    return rows, report


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such data file: .*none\.jsonl"):
        list(files.read(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match=r"no such data file: .*none\.jsonl"):
        only(str(tmp_path / "none.jsonl"), tmp_path, encoding())
    with pytest.raises(UserError, match=r"empty\.jsonl: no rows"):
        only(write(tmp_path / "empty.jsonl"), tmp_path, encoding())
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.jsonl"):
        list(files.read(tmp_path / "binary.jsonl"))
    with pytest.raises(UserError, match="cannot be read"):
        list(files.read(tmp_path))
    for name in ("a.jsonl.gz", "a.json.gz"):
        whole = gzip.compress(b'{"prompt": "a", "response": "b"}\n' * 1000)
        for content in (b"plain text", whole[:40]):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(UserError, match=rf"{name}: not a gzip file, or cut short"):
                list(files.read(tmp_path / name))


CONTENT = [{"prompt": "one", "response": "two", "id": 7}, {"prompt": "a\u2028b", "response": "c"}]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path, lines = tmp_path / name, "".join(json.dumps(row) + "\n" for row in CONTENT)
    if name.endswith("parquet"):
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(CONTENT), path)
    else:
        text = json.dumps(CONTENT) if ".json" in name and "jsonl" not in name else lines
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode("utf-8-sig"))
    entries = list(files.read(path))
    assert [row for entry in entries for row in entry.rows] == [Row("one", "two"), Row("a\u2028b", "c")]
    assert [entry.unused for entry in entries] == [("id",), ()]


def test_broken_tables_and_lists(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"prompt": "a", "response": "b"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.json: must be a list of objects, got dict"):
        list(files.read(tmp_path / "a.json"))
    (tmp_path / "a.json").write_text('{"prompt": "a", "response": "b"}\n{}', encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.json: not JSON .*JSON Lines are named \.jsonl"):
        list(files.read(tmp_path / "a.json"))
    (tmp_path / "a.json").write_text('[{"prompt": "a", "response": "b"}, {"prompt": "a"}]', encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.json: entry 2: 'response'"):
        list(files.read(tmp_path / "a.json"))
    (tmp_path / "a.parquet").write_bytes(b"no table")
    with pytest.raises(UserError, match=r"a\.parquet: not a Parquet file"):
        list(files.read(tmp_path / "a.parquet"))


def test_each_turn_of_the_assistant_is_a_row(tmp_path: Path) -> None:
    turns = [("system", "be brief"), ("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"), ("assistant", "6"), ("user", "bye")]
    chat = [{"role": role, "content": content} for role, content in turns]
    path = write(tmp_path / "chat.jsonl", json.dumps({"messages": chat}))
    (entry,) = files.read(Path(path))
    assert entry.rows == (Row(tuple(chat[:2]), "4"), Row(tuple(chat[:4]), "6"))
    tokenizer = Tokenizer.from_folder(FOLDER)
    rows, _ = only(path, tmp_path / "cache", encoding())
    prompt, answer = rows.pair(1)
    assert prompt.tolist() == tokenizer.encode_chat(chat[:4])
    assert answer.tolist() == [*tokenizer.encode("6"), 3]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "must be a list"),
        ([{"role": "user", "content": "a"}], "no message of the assistant"),
        ([{"role": "assistant", "content": "a"}], "message 1: the assistant speaks first"),
        ([{"role": "user", "content": "a"}, {"role": "assistant"}], "message 2: 'content'"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}], "message 2: 'content' is empty"),
    ],
)
def test_chats_without_an_answer(tmp_path: Path, messages: object, words: str) -> None:
    path = write(tmp_path / "chat.jsonl", json.dumps({"messages": messages}))
    with pytest.raises(UserError) as caught:
        list(files.read(Path(path)))
    assert str(caught.value).startswith(f"{path}:1: ") and words in str(caught.value)


def test_rows_are_templated_ended_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *good(20))
    store, report = only(path, tmp_path / "cache", encoding())
    assert (len(store), report.rows, report.entries, report.too_long) == (20, 20, 20, 0)
    assert report.tokens == store.lengths.sum() and str(report) == f"{path}: 20 rows, {report.tokens:,} tokens"
    prompt, answer = store.pair(0)
    assert prompt.tolist() == ROWS[0]["prompt_ids"]
    assert answer[-1] == 3
    lengths = sorted(store.lengths.tolist())
    short, report = only(path, tmp_path / "cache", encoding(lengths[9]))
    assert report.too_long == sum(length > lengths[9] for length in lengths) and len(short) + report.too_long == 20
    assert str(report).endswith(f", {report.too_long} dropped (longer than the context)")
    with pytest.raises(UserError, match="longer than the context"):
        only(path, tmp_path / "cache", encoding(3))


def test_long_rows_can_be_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *good(20))
    whole, _ = only(path, tmp_path / "cache", encoding())
    prompts = sorted(len(whole.pair(i)[0]) for i in range(20))
    context = prompts[10] + 1  # half of the prompts and a bit leave no room
    cut, report = only(path, tmp_path / "cache", encoding(context, "cut"))
    assert report.prompt_too_long == sum(length >= context for length in prompts)
    assert report.rows == len(cut) == 20 - report.prompt_too_long and report.cut > 0
    fits = [i for i in range(20) if len(whole.pair(i)[0]) < context]
    for row, i in enumerate(fits):
        (prompt, answer), (longer, all_of_it) = cut.pair(row), whole.pair(i)
        assert prompt.tolist() == longer.tolist()
        assert answer.tolist() == all_of_it[: context - len(prompt)].tolist()


def test_text_is_all_answer_and_is_cut_into_pieces(tmp_path: Path) -> None:
    text = ROWS[0]["response"] * 5
    path = write(tmp_path / "text.jsonl", json.dumps({"text": text, "url": "x"}))
    ids = [*Tokenizer.from_folder(FOLDER).encode(text), 3]
    rows, report = only(path, tmp_path / "cache", encoding(16, "cut"))
    pieces = [rows.pair(i) for i in range(len(rows))]
    start = pieces[0][0].tolist()  # what the tokenizer puts before every text
    assert all(prompt.tolist() == start for prompt, _ in pieces) and len(pieces) > 2
    assert [token for _, answer in pieces for token in answer.tolist()] == ids
    assert report.unused == ("url",) and "1 cut" in str(report) and str(report).endswith("fields not used: url")


def test_shards_are_made_once_and_again_when_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write(tmp_path / "rows.jsonl", *good(20)), tmp_path / "cache"
    first, _ = only(path, cache, encoding())
    made = []
    real = shards._write
    monkeypatch.setattr(shards, "_write", lambda *given: (made.append(1), real(*given)))
    again, report = only(path, cache, encoding())
    assert not made and isinstance(again.stores[0].ids, np.memmap)
    for i in range(20):
        assert [part.tolist() for part in first.pair(i)] == [part.tolist() for part in again.pair(i)]
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(Path(path).read_bytes())
    assert only(str(moved), cache, encoding())[1] == replace(report, file=str(moved)) and not made
    only(path, cache, encoding(60))
    only(path, cache, encoding(60, "cut"))
    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace('"single_word": false', '"single_word": true', 1), encoding="utf-8")
    only(path, cache, replace(encoding(), tokenizer=Tokenizer.from_folder(folder)))
    write(tmp_path / "rows.jsonl", *good(21))
    assert only(path, cache, encoding())[1].rows == 21
    assert len(made) == 4
    (folder,) = [folder for folder in cache.iterdir() if json.loads((folder / "report.json").read_text())["rows"] == 21]
    (folder / "ids.bin").write_bytes(b"cut short")
    assert only(path, cache, encoding())[1].rows == 21
    assert len(made) == 5


def test_a_tokenizer_that_does_not_fit_the_model(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *good(3))
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the tokenizer does not fit the model: token id \d+, and the model has 9"):
        only(path, tmp_path / "cache", encoding(vocab_size=9))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write(tmp_path / "rows.jsonl", *good(3)), tmp_path / "cache"

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.np, "save", full)
    with pytest.raises(UserError, match=r"cannot be written .*No space left on device"):
        only(path, cache, encoding())
    assert list(cache.iterdir()) == []


def test_too_little_disk_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.shutil, "disk_usage", lambda path: (10**9, 10**9, 1000))
    with pytest.raises(UserError, match=r"run: too little disk: checkpoints take [1-9][\d.]* MB, 0\.0 MB are free"):
        loop.train(tiny(tmp_path), tmp_path / "run")


def test_an_epoch_takes_each_file_by_its_weight(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", *good(10)), write(tmp_path / "b.jsonl", *good(10, 10))]
    rows, _ = shards.shards(paths, [2.0, 0.5], encoding(), tmp_path / "cache", "train")
    assert (len(rows), rows.per_epoch) == (20, 25)
    epochs = [rows.epoch(np.random.default_rng(seed)) for seed in range(40)]
    for epoch in epochs:
        counts = np.bincount(epoch, minlength=20)
        assert (counts[:10] == 2).all() and counts[10:].sum() == 5 and counts[10:].max() == 1
    assert (np.bincount(np.concatenate(epochs), minlength=20)[10:] > 5).all()  # another half each time
    alone, _ = only(paths[1], tmp_path / "cache", encoding())
    assert rows.pair(13)[1].tolist() == alone.pair(3)[1].tolist()


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


def test_each_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = loop.train(tiny(tmp_path, **{"data.weights": "[0.5]"}), tmp_path / "run")
    assert run.batches.steps_per_epoch == 15 // 4
    notes = capsys.readouterr().err.splitlines()
    assert notes[0].startswith(f"note: {tmp_path}/train.jsonl: 30 rows, ") and "validation.jsonl: 8 rows, " in notes[1]


def test_changed_data_is_refused_on_resume(tmp_path: Path) -> None:
    loop.train(tiny(tmp_path), tmp_path / "run")
    longer = {"training.max_steps": "4"}
    loop.train(tiny(tmp_path, **longer), tmp_path / "run", resume=True)
    given = tiny(tmp_path, **longer)
    write(tmp_path / "train.jsonl", *good(31))
    with pytest.raises(UserError) as caught:
        loop.train(given, tmp_path / "run", resume=True)
    assert f"{tmp_path}/train.jsonl has changed (30 rows then, 31 now)" in str(caught.value)
    assert json.loads((tmp_path / "run" / "data.json").read_text())["train"][0]["rows"] == 30
    other = write(tmp_path / "other.jsonl", *good(30, 1))
    given = tiny(tmp_path, **longer, **{"data.train": json.dumps([other])})
    with pytest.raises(UserError) as caught:
        loop.train(given, tmp_path / "run", resume=True)
    for words in (f"{other} is new", f"{tmp_path}/train.jsonl is missing in data.train"):
        assert words in str(caught.value)
    tokenizer = tmp_path / "run" / "last" / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    tokenizer.write_text(text.replace('"single_word": false', '"single_word": true', 1), encoding="utf-8")
    with pytest.raises(UserError, match="the tokenizer has changed"):
        loop.train(tiny(tmp_path, **longer), tmp_path / "run", resume=True)


@pytest.mark.parametrize("weights", ["[1, 2]", "[]", "[0]"])
def test_weights_of_files_are_checked(tmp_path: Path, weights: str) -> None:
    with pytest.raises(UserError, match=r"data\.weights must have one entry for each file"):
        tiny(tmp_path, **{"data.weights": weights})
    assert tiny(tmp_path, **{"data.weights": "[2]"}).data.weights == (2.0,)


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
    from refusion.models.checkpoint import read_config

    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    content = {"eos_token_id": [3, 0], "refusion": {"slot_size": 5}}
    (folder / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    loop.train(tiny(tmp_path, **{"model.start": json.dumps(str(folder))}), tmp_path / "run")
    saved = read_config(tmp_path / "run" / "last")
    assert saved.eos_token_ids == (3, 0)
    assert saved.defaults == {"method": "refusion", "slot_size": 5}
