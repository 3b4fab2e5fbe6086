"""One line of progress with the time left: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Counts towards `total`; never draws more often than `interval` seconds (a terminal) or 30 s (a file)."""

    def __init__(self, label: str, total: int, start: int = 0, stream: TextIO | None = None) -> None:
        self.label, self.total, self.first, self.stream = label, total, start, stream or sys.stderr
        self.live = self.stream.isatty()
        self._began = time.monotonic()
        self._drawn = float("-inf")

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if now - self._drawn < (0.2 if self.live else 30.0) and done < self.total:
            return
        self._drawn = now
        pace = (now - self._began) / max(1, done - self.first)
        left = _clock(pace * (self.total - done))
        width = 24
        bar = "#" * (width * done // max(1, self.total))
        text = f"{self.label} [{bar:<{width}}] {done}/{self.total}  {left} left  {note}"
        print(f"\r\x1b[2K{text}" if self.live else text, end="" if self.live else "\n", file=self.stream, flush=True)

    def close(self) -> None:
        if self.live:
            print(file=self.stream, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
