"""Rows of files as token ids: tokenised once into a folder that is mapped into memory.

    data/train-<digest>/    ids.bin      all tokens, uint16 or uint32
                            bounds.npy   [rows, 3]: start, end of prompt, end
                            report.json  where they come from, and what was cut or dropped and why

Contract: a shard is a pure function of the file's bytes, the tokenizer with its template, and the options; it appears whole or not
at all. Nothing of a file is lost without being counted.
"""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from refusion.config import UserError
from refusion.models.checkpoint import replaced_folder
from refusion.models.tokenizer import Tokenizer
from refusion.training import files
from refusion.training.data import Mixture, RowStore
from refusion.training.files import Row

VERSION = 1  # of what is made from the same file
FLUSH = 1_000_000  # tokens kept in memory
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Encoding:
    """What makes token ids of a row."""

    tokenizer: Tokenizer
    eos: int
    context: int  # tokens of the longest row
    vocab_size: int  # of the model
    too_long: str = "drop"  # or "cut"

    def fingerprint(self) -> list[Any]:
        return [VERSION, self.tokenizer.fingerprint, self.eos, self.context, self.vocab_size, self.too_long]


@dataclass(frozen=True)
class Report:
    """What has become of a file."""

    file: str
    sha256: str
    entries: int = 0
    rows: int = 0  # that are trained on
    tokens: int = 0
    answer_tokens: int = 0
    cut: int = 0  # answers (and texts) that lost their end, or were cut into pieces
    too_long: int = 0  # dropped: longer than the context
    prompt_too_long: int = 0  # dropped though long rows are cut: the prompt leaves no room for an answer
    unused: tuple[str, ...] = ()  # fields

    def __str__(self) -> str:
        """One line: "train.jsonl: 1,000 rows, 52,000 tokens, 2 dropped (longer than the context)"."""
        parts = [f"{self.file}: {self.rows:,} rows, {self.tokens:,} tokens"]
        parts += [f"{self.cut:,} cut"] if self.cut else []
        parts += [f"{self.too_long:,} dropped (longer than the context)"] if self.too_long else []
        parts += [f"{self.prompt_too_long:,} dropped (no room behind the prompt)"] if self.prompt_too_long else []
        parts += [f"fields not used: {', '.join(self.unused)}"] if self.unused else []
        return ", ".join(parts)


def shards(
    paths: Sequence[str], weights: Sequence[float] | None, encoding: Encoding, cache: Path, name: str,
    progress: Progress | None = None,
) -> tuple[Mixture, list[Report]]:  # fmt: skip
    """All rows of some files, each taken `weights` times an epoch, and what has become of every file.

    Raises `UserError` when a file is missing, broken, or has no row that fits.
    """
    found = [_shard(Path(path), encoding, cache, name, progress) for path in paths]
    for path, (store, report) in zip(paths, found, strict=True):
        if report.entries == 0:
            raise UserError(f"{path}: no rows")
        if len(store) == 0:
            raise UserError(f"{path}: every row is longer than the context of {encoding.context} tokens")
    return Mixture([store for store, _ in found], weights), [report for _, report in found]


def _shard(path: Path, encoding: Encoding, cache: Path, name: str, progress: Progress | None) -> tuple[RowStore, Report]:
    content = _sha256(path)
    digest = hashlib.sha256(json.dumps([content, *encoding.fingerprint()]).encode()).hexdigest()[:16]
    folder = cache / f"{name}-{digest}"
    made = _load(folder)
    if made is None:
        with replaced_folder(folder) as new:
            _write(new, path, content, encoding, progress)
        made = _load(folder)
        assert made is not None
    store, report = made
    return store, replace(report, file=str(path))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no such data file: {path}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _load(folder: Path) -> tuple[RowStore, Report] | None:
    """A shard that was made before; None when there is none, or what is there is damaged."""
    try:
        report = Report(**json.loads((folder / "report.json").read_text(encoding="utf-8")))
        bounds = np.load(folder / "bounds.npy")
        path, wide = folder / "ids.bin", np.dtype(np.uint32 if report.tokens and (folder / "wide").exists() else np.uint16)
        if path.stat().st_size != report.tokens * wide.itemsize or bounds.shape != (report.rows, 3):
            return None
        ids = np.memmap(path, dtype=wide, mode="r") if report.tokens else np.empty(0, wide)
        return RowStore(ids, bounds), replace(report, unused=tuple(report.unused))
    except (OSError, ValueError, TypeError, EOFError):
        return None


def _write(folder: Path, path: Path, content: str, encoding: Encoding, progress: Progress | None) -> None:
    """Tokenise a file into a new folder."""
    wide = encoding.vocab_size > 2**16
    if wide:
        (folder / "wide").touch()
    report, unused, bounds, tokens = Report(path.name, content), set[str](), array.array("q"), 0
    flat, size = array.array("I" if wide else "H"), path.stat().st_size
    with (folder / "ids.bin").open("wb") as file:
        for entry in files.read(path):
            unused |= set(entry.unused)
            report = replace(report, entries=report.entries + 1)
            for row in entry.rows:
                pairs, report = fitted(encoded(row, entry.place, encoding), row, encoding, report)
                for prompt, answer in pairs:
                    flat.extend(prompt)
                    flat.extend(answer)
                    bounds.extend((tokens, tokens + len(prompt), tokens + len(prompt) + len(answer)))
                    tokens += len(prompt) + len(answer)
                    report = replace(report, rows=report.rows + 1, answer_tokens=report.answer_tokens + len(answer))
            if len(flat) > FLUSH:
                flat.tofile(file)
                del flat[:]
            if progress is not None and report.entries % 100 == 0:
                progress(entry.read, size, f"{report.rows:,} rows, {tokens:,} tokens")
        flat.tofile(file)
    np.save(folder / "bounds.npy", np.array(bounds, dtype=np.int64).reshape(-1, 3))
    report = replace(report, tokens=tokens, unused=tuple(sorted(unused)))
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def encoded(row: Row, place: str, encoding: Encoding) -> tuple[list[int], list[int]]:
    """Prompt and response as token ids; the response ends with end-of-sequence. Prompts go through the model's chat template, if
    it has one: the same that `generate` uses."""
    tokenizer = encoding.tokenizer
    try:
        if row.prompt is None:
            prompt = tokenizer.encode("", add_special_tokens=True)
        elif isinstance(row.prompt, tuple):
            if not tokenizer.has_chat_template:
                raise UserError("messages need a chat template, and this model's tokenizer has none")
            prompt = tokenizer.encode_chat(row.prompt)
        elif tokenizer.has_chat_template:
            prompt = tokenizer.encode_chat([{"role": "user", "content": row.prompt}])
        else:
            prompt = tokenizer.encode(row.prompt, add_special_tokens=True)
        answer = [*tokenizer.encode(row.response), encoding.eos]
        if (largest := max(max(prompt, default=0), max(answer))) >= encoding.vocab_size:
            raise UserError(
                f"the tokenizer does not fit the model: token id {largest}, and the model has {encoding.vocab_size} tokens"
            )
        return prompt, answer
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def fitted(
    pair: tuple[list[int], list[int]], row: Row, encoding: Encoding, report: Report
) -> tuple[list[tuple[list[int], list[int]]], Report]:
    """What of a row fits the context, and the report on it. A text that is cut gives several rows; an answer that is cut has no
    end-of-sequence."""
    prompt, answer = pair
    room = encoding.context - len(prompt)
    if len(answer) <= room:
        return [pair], report
    if encoding.too_long == "drop":
        return [], replace(report, too_long=report.too_long + 1)
    if room < 1:
        return [], replace(report, prompt_too_long=report.prompt_too_long + 1)
    pieces = [answer[i : i + room] for i in range(0, len(answer), room)] if row.prompt is None else [answer[:room]]
    return [(prompt, piece) for piece in pieces], replace(report, cut=report.cut + 1)

