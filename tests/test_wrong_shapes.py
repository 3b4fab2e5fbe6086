"""Model folders whose files are valid JSON of a wrong shape: one line that names the file, whatever stands where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from refusion.cli import main
from refusion.config import LARGEST_SHAPE, UserError
from refusion.generate import check_defaults
from refusion.models.checkpoint import read_config, resolve_folder
from refusion.models.tokenizer import Tokenizer

# Fields that the tiny folder does not have, and that are read where they are there.
FILES: dict[str, dict[str, Any]] = {
    "config.json": {"layer_types": None, "rope_parameters": {"rope_theta": 1.0}, "quantization_config": None},
    "generation_config.json": {"refusion": {"slot_size": 4, "stop": "x", "method": "refusion", "top_p": 1.0}},
    "tokenizer_config.json": {
        "added_tokens_decoder": {"3": {"content": "<eos>"}}, "additional_special_tokens": ["<eos>"],
        "extra_special_tokens": [], "chat_template": [{"name": "default", "template": "x"}],
    },
    "special_tokens_map.json": {"eos_token": {"content": "<eos>"}},
    "added_tokens.json": {"<new>": 95},
    "tokenizer.json": {},
}  # fmt: skip
VALUES = (
    None, True, -1, 1.5, 10**30, "x", [], [5], ["x"], [[1]], [{}], {}, {"a": 1}, {"a": {}}, {"1": {"content": []}},
    [{"name": [], "template": "x"}], [{"name": "default", "template": 2}],
)  # fmt: skip


@pytest.fixture
def folder(trained_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(trained_folder, path)
    for file in (path, *path.iterdir()):
        file.chmod(0o755)
    return path


def places(value: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    """Paths of keys to everything down to a depth; of a long list or object, to the first two entries."""
    yield ()
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, inner) in enumerate(entries):
        if depth and (number < 2 or len(value) < 40):
            yield from ((key, *rest) for rest in places(inner, depth - 1))


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = put(copy[place[0]], place[1:], new)
    return copy


@pytest.mark.parametrize("file", FILES)
def test_no_shape_of_any_field_is_a_traceback(folder: Path, file: str, tmp_path: Path) -> None:
    path, complaints = folder / file, 0
    whole = {**(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}), **FILES[file]}
    for place in places(whole, 3):
        for value in VALUES:
            path.write_text(json.dumps(put(whole, place, value)), encoding="utf-8")
            try:
                config, tokenizer = read_config(folder), Tokenizer.from_folder(folder)
                check_defaults(config, folder)
                tokenizer.save(tmp_path)
            except UserError as error:
                complaints += 1
                text = str(error)
                assert str(path) in text and "\n" not in text and len(text) < 500, (place, value, text)
    assert complaints > 10


@pytest.mark.parametrize(("file", "place", "value"), [
    ("tokenizer.json", (), []), ("tokenizer.json", (), {}), ("tokenizer.json", (), {"model": 5}),
    ("tokenizer.json", (), {"model": {"vocab": {"a": {}}}}), ("tokenizer.json", ("added_tokens",), [{}]),
    ("tokenizer.json", ("added_tokens",), 5), ("tokenizer.json", ("model", "vocab"), None),
    ("tokenizer_config.json", (), []), ("tokenizer_config.json", (), 5), ("tokenizer_config.json", ("eos_token",), 5),
    ("tokenizer_config.json", ("additional_special_tokens",), 5),
    ("tokenizer_config.json", ("added_tokens_decoder",), {"1": {"content": []}}),
    ("tokenizer_config.json", ("chat_template",), [{"name": "default", "template": 2}]),
    ("generation_config.json", (), []), ("generation_config.json", (), 5),
    ("generation_config.json", ("eos_token_id",), "<eos>"), ("generation_config.json", ("eos_token_id",), [[3]]),
    ("generation_config.json", ("refusion",), []), ("generation_config.json", ("refusion",), {"slot_size": "x"}),
    ("config.json", (), []), ("config.json", (), 5), ("config.json", ("mask_token_id",), [4]),
    ("config.json", ("mask_token_id",), "4"), ("config.json", ("mask_token_id",), -1),
    ("config.json", ("eos_token_id",), "3"), ("config.json", ("architectures",), 5),
    ("config.json", ("architectures",), {"a": 1}), ("config.json", ("hidden_size",), 10**9),
    ("config.json", ("num_hidden_layers",), 10**9), ("config.json", ("rope_theta",), 10**400),
])  # fmt: skip
def test_the_command_names_the_file(
    folder: Path, file: str, place: tuple[str, ...], value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / file
    path.write_text(json.dumps(put({**json.loads(path.read_text()), **FILES[file]}, place, value)), encoding="utf-8")
    for command in (["info", str(folder)], ["generate", "Max has 20 eggs.", "--model", str(folder)]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith("error: ") and str(path) in captured.err


def test_the_largest_shapes_can_be_counted(folder: Path) -> None:
    """No product of sizes within the limits overflows; only the number of layers is made small, as each takes time."""
    raw = json.loads((folder / "config.json").read_text())
    largest = {**LARGEST_SHAPE, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({**raw, **largest}), encoding="utf-8")
    assert read_config(folder).parameters > 2**44


@pytest.mark.parametrize("name", ["x" * 5000, "org/" + "x" * 5000, "a\0b", "~nobody-of-this-name/model", "a\nb", "\udcff"])
def test_names_that_no_file_can_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        resolve_folder(name)
    for command in (["info", name], ["generate", "x", "--model", name]):
        assert main(command) == 2
        complaint = capsys.readouterr().err
        assert complaint.startswith("error: no such model folder") and complaint.count("\n") == 1
        assert len(complaint) < 400 and "\0" not in complaint
