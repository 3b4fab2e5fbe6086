"""Training rows from files, as text: what formats there are, and what shapes a row may have.

    .json            a list of objects                                             (also .json.gz)
    .jsonl, others   JSON Lines: an object a line; blank lines are skipped         (also .jsonl.gz)
    .parquet         a table, with the extra `[data]`

    {"prompt", "response"}, {"query", "response"}     one row
    {"messages": [{"role", "content"}, ...]}          a row for each turn of the assistant, what stands before it is its prompt
    {"text"}                                          all of it is answer

Contract: whatever is wrong is a `UserError` that names the file and the line (of a list or a table, the entry). Knows no model
and no tokenizer.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from refusion.config import UserError

Message = Mapping[str, str]
SHAPES = "prompt and response, query and response, messages, or text"


@dataclass(frozen=True)
class Row:
    """A prompt and its response. prompt: text, messages of a chat, or None for text that is all response."""

    prompt: str | tuple[Message, ...] | None
    response: str


@dataclass(frozen=True)
class Entry:
    """What stands in one place of a file."""

    place: str  # "rows.jsonl:12"
    rows: tuple[Row, ...]
    unused: tuple[str, ...]  # fields that mean nothing here
    read: int = 0  # bytes of the file that have been read up to here


def read(path: Path) -> Iterator[Entry]:
    """The entries of a file, one after the other."""
    with _complaints(path):
        for place, value, done in _values(path):
            rows, used = _rows(value, place)
            yield Entry(place, rows, tuple(sorted(value.keys() - used)), done)


# --- formats


def _values(path: Path) -> Iterator[tuple[str, Any, int]]:
    """(place, value, bytes read) of everything in a file."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _table(path)
    elif name.endswith(".json"):
        with _opened(path) as (file, _):
            try:
                values = json.loads(file.read().decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}: not JSON ({error}); JSON Lines are named .jsonl") from None
        if not isinstance(values, list):
            raise UserError(f"{path}: must be a list of objects, got {type(values).__name__}")
        for number, value in enumerate(values, 1):
            yield f"{path}: entry {number}", value, 0
    else:
        with _opened(path) as (file, done):
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _json(line, f"{path}:{number}"), done()


def _json(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error})") from None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BufferedIOBase, Callable[[], int]]]:
    """A file, unpacked where it is packed, and how many bytes of it have been read."""
    with path.open("rb") as raw:
        if path.name.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked, raw.tell
        else:
            yield raw, raw.tell


def _table(path: Path) -> Iterator[tuple[str, Any, int]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs the package pyarrow: pip install 'refusion[data]'") from None
    try:
        with parquet.ParquetFile(path) as table:
            number = 0
            for batch in table.iter_batches():
                for value in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", {k: v for k, v in value.items() if v is not None}, 0
    except ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file that can be read ({' '.join(str(error).split())[:200]})") from None


@contextmanager
def _complaints(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no such data file: {path}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a gzip file, or cut short ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


# --- shapes


def _rows(value: Any, place: str) -> tuple[tuple[Row, ...], set[str]]:
    """The rows of an entry, and the fields that they are made of."""
    if not isinstance(value, dict):
        raise UserError(f"{place}: must be an object with {SHAPES}, got {type(value).__name__}")
    for key in ("prompt", "query"):
        if key in value:
            return (Row(_text(value, key, place), _text(value, "response", place)),), {key, "response"}
    if "messages" in value:
        return tuple(_turns(value["messages"], place)), {"messages"}
    if "text" in value:
        return (Row(None, _text(value, "text", place)),), {"text"}
    fields = ", ".join(map(repr, value)) or "none"
    raise UserError(f"{place}: must have the fields {SHAPES}; its fields: {fields[:200]}")


def _text(value: Mapping[str, Any], key: str, place: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise UserError(f"{place}: {key!r} must be a string, got {text!r:.40}")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{place}: {key!r} holds half of a surrogate pair")
    if not text.strip():
        raise UserError(f"{place}: {key!r} is empty")
    return text


def _turns(messages: Any, place: str) -> Iterator[Row]:
    """A row for every turn of the assistant."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{place}: 'messages' must be a list of objects with 'role' and 'content', got {messages!r:.40}")
    before: list[Message] = []
    for number, message in enumerate(messages, 1):
        where = f"{place}: message {number}"
        turn = {key: _text(message, key, where) for key in ("role", "content")}
        if turn["role"] == "assistant":
            if not before:
                raise UserError(f"{where}: the assistant speaks first, so there is no prompt")
            yield Row(tuple(before), turn["content"])
        before.append(turn)
    if not any(message["role"] == "assistant" for message in before):
        raise UserError(f"{place}: no message of the assistant, so there is no answer")
