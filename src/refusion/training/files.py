"""Training rows from JSON Lines files: one `{"prompt": ..., "response": ...}` a line.

Contract: whatever is wrong with the data is a `UserError` that names file and line; rows too long for the context are dropped and
counted, never cut. Knows no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from refusion.config import UserError
from refusion.models.tokenizer import Tokenizer
from refusion.training.data import RowStore, cached_store


@dataclass(frozen=True)
class Row:
    """A prompt and its response, as text."""

    prompt: str
    response: str


def read(path: Path) -> Iterator[Row]:
    """The rows of a file; blank lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"no such data file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _row(line, f"{path}:{number}")


def _row(line: str, place: str) -> Row:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise UserError(f"{place}: must be an object with 'prompt' and 'response', got {type(entry).__name__}")
    for key in ("prompt", "response"):
        if not isinstance(entry.get(key), str):
            raise UserError(f"{place}: {key!r} must be a string, got {entry.get(key)!r:.40}")
        if any("\ud800" <= character <= "\udfff" for character in entry[key]):
            raise UserError(f"{place}: {key!r} holds half of a surrogate pair")
        if not entry[key].strip():
            raise UserError(f"{place}: {key!r} is empty")
    return Row(entry["prompt"], entry["response"])


def rows(
    tokenizer: Tokenizer, eos: int, files: Sequence[str], context: int, cache: Path, name: str
) -> tuple[RowStore, int]:
    """All rows of some files as token ids, and how many were dropped because they are longer than `context` tokens.

    Prompts go through the model's chat template, if it has one. The store is kept in `cache` under a fingerprint of the
    files' contents, the tokenizer and the template.
    """
    paths = [Path(file) for file in files]
    read_all = [row for path in paths for row in read(path)]
    if not read_all:
        raise UserError(f"{', '.join(files)}: no rows")
    content = hashlib.sha256("\0".join(f"{row.prompt}\1{row.response}" for row in read_all).encode()).hexdigest()
    sample = tokenizer.encode("the quick brown fox 0123")
    fingerprint = [content, context, eos, tokenizer.vocab_size, sample, tokenizer.chat_template]
    store = cached_store(
        cache / f"{name}.npz",
        fingerprint,
        lambda: RowStore.build(pair for row in read_all if _fits(pair := encode(tokenizer, eos, row), context)),
    )
    if len(store) == 0:
        raise UserError(f"{', '.join(files)}: every row is longer than the context of {context} tokens")
    return store, len(read_all) - len(store)


def _fits(pair: tuple[list[int], list[int]], context: int) -> bool:
    return len(pair[0]) + len(pair[1]) <= context


def encode(tokenizer: Tokenizer, eos: int, row: Row) -> tuple[list[int], list[int]]:
    """Prompt and response as token ids; the response ends with end-of-sequence."""
    if tokenizer.has_chat_template:
        prompt = tokenizer.encode_chat([{"role": "user", "content": row.prompt}])
    else:
        prompt = tokenizer.encode(row.prompt, add_special_tokens=True)
    return prompt, [*tokenizer.encode(row.response), eos]
