"""The files in which benchmarks are published, as records: JSON Lines, JSON and CSV, each also gzipped, and Parquet.

Contract: what cannot be read is a `UserError` that names the file, and the line where there is one. Knows no benchmark.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from refusion.config import UserError
from refusion.evaluation.tasks.base import Record

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")  # the first three also with .gz


def find(path: Path, patterns: Sequence[str]) -> list[Path]:
    """The file, or the files of a folder that the first fitting pattern names, numbers in their names in numeric order."""
    if path.is_file():
        return [path]
    for pattern in patterns:
        found = [file for file in path.glob(pattern) if file.is_file()]
        if found:
            return sorted(found, key=_natural)
    return []


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts 2.json before 10.json.

    >>> sorted([Path("a/10.json"), Path("a/2.json")], key=_natural)[0].name
    '2.json'
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", path.as_posix())]


def records(path: Path) -> Iterator[Record]:
    """All entries of a file."""
    ending = next((end for end in ENDINGS if path.name.lower().removesuffix(".gz").endswith(end)), None)
    stem = path.name.partition(".")[0]
    if ending is None:
        raise UserError(f"{path}: must end with one of {', '.join(ENDINGS)} (all but the last also with .gz)")
    if ending == ".parquet":
        entries = _parquet(path)
    elif ending == ".csv":
        entries = _csv(_text(path), path)
    else:
        entries = _json(_text(path), path, ending == ".jsonl")
    for place, entry in entries:
        if not isinstance(entry, dict):
            raise UserError(f"{place}: must be an object, got {type(entry).__name__}")
        yield Record(entry, place, stem)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text") from None


def _json(text: str, path: Path, lines: bool) -> Iterator[tuple[str, Any]]:
    """Entries of an array, of {"examples": [...]}, one single entry, or one a line: some files named .json hold lines."""
    if not lines:
        try:
            whole = _loads(text, path, 0)
        except UserError:
            if _loads_or_none(text.lstrip().partition("\n")[0]) is None:
                raise
        else:
            yield from _listed(whole, path)
            return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}:{number}", _loads(line, path, number)


def _loads(text: str, path: Path, line: int) -> Any:
    """A JSON value. line: of the file, 0 if the text is all of it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{line or error.lineno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{line or 1}: not JSON ({error})") from None


def _loads_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _listed(whole: Any, path: Path) -> Iterator[tuple[str, Any]]:
    if isinstance(whole, dict) and isinstance(whole.get("examples"), list):
        whole = whole["examples"]
    if isinstance(whole, list):
        yield from ((f"{path}: entry {number}", entry) for number, entry in enumerate(whole, 1))
    else:
        yield str(path), whole


def _csv(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            if None in row:
                raise UserError(f"{path}:{reader.line_num}: more fields than the first line names")
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not CSV ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """Read by pyarrow where it is installed."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(f"{path}: Parquet needs pyarrow (pip install pyarrow); or export the file to JSON Lines") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own errors are of these kinds
        raise UserError(f"{path}: not Parquet ({' '.join(str(error).split())[:100]})") from None
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))
