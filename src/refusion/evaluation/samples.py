"""Every answer to a benchmark, kept as JSON Lines: a header with the settings, then one answer a line.

Contract: an answer is on the disk when it has been added. A file is only continued under the same header; a line that a killed
run has not finished is cut off. Knows no task and no model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from refusion.config import UserError

MARK = "refusion samples"


def default_path(task: str, model: str) -> Path:
    """samples-TASK-MODEL.jsonl in the current folder; of a path, its last two names.

    >>> default_path("gsm8k", "runs/nano/last").name
    'samples-gsm8k-nano-last.jsonl'
    """
    names = "-".join(Path(model).parts[-2:])
    return Path(f"samples-{task}-{re.sub(r'[^A-Za-z0-9._-]+', '', names).strip('-.') or 'model'}.jsonl")


class Samples:
    """An open file of answers. `done` maps the numbers of the items that are answered to what was written about them."""

    def __init__(self, path: Path, header: Mapping[str, Any], resume: bool = False) -> None:
        """Open a file for writing; with `resume`, go on with what is there.

        Without it, an older file of samples is kept beside as NAME.old. Raises `UserError` when the file is none of ours, has
        another header, is broken, or cannot be written.
        """
        self.path, self.done = path, dict[int, dict[str, Any]]()
        self.header = {"file": MARK, **json.loads(json.dumps(header))}
        try:
            there = path.exists() and path.stat().st_size > 0
            if there:
                self._take_up(resume)
            self.file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--samples {path}: cannot be written ({error.strerror})") from None
        if not (there and resume):
            self._write(self.header)

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.file.close()

    def add(self, number: int, sample: Mapping[str, Any]) -> None:
        """Write the answer to item `number`."""
        line = {"number": number, **sample}
        self._write(line)
        self.done[number] = line

    def _write(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.file.flush()

    def _take_up(self, resume: bool) -> None:
        data = self.path.read_bytes()
        lines = data.split(b"\n")
        header = _object(lines[0])
        if header is None or header.get("file") != MARK:
            raise UserError(f"--samples {self.path}: is there already, and is no file of samples")
        if not resume:
            os.replace(self.path, self.path.with_name(self.path.name + ".old"))
            return
        self._same(header)
        if lines[-1]:  # the run was killed while it wrote
            os.truncate(self.path, len(data) - len(lines[-1]))
        for number, text in enumerate(lines[1:-1], 2):
            line = _object(text)
            if line is None or not isinstance(line.get("number"), int):
                raise UserError(f"{self.path}:{number}: is broken; remove the line, and --resume answers it again")
            self.done[line["number"]] = line

    def _same(self, header: Mapping[str, Any]) -> None:
        """Whether the file was begun under the same header."""
        for key in {**self.header, **header}:
            before, now = header.get(key), self.header.get(key)
            if isinstance(before, dict) and isinstance(now, dict):
                part = next((k for k in {**now, **before} if before.get(k) != now.get(k)), None)
                if part is not None:
                    key, before, now = f"{key}.{part}", before.get(part), now.get(part)
            if before != now:
                raise UserError(
                    f"--resume: {self.path} was begun with {key} = {before!r:.80}, now it is {now!r:.80}; "
                    "give --samples another name"
                )


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
