"""Progress of long work with the time left: a bar on a terminal, a plain line now and then elsewhere.

Contract: `bar` hands out a function to call with (done, total, note). Work itself knows only that function. Another total is
another piece of work: its pace is measured anew.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

Report = Callable[[int, int, str], None]
QUIET = 30.0  # seconds between lines where there is no terminal


@contextmanager
def bar(label: str) -> Iterator[Report]:
    """Shows how far `label` has come, on stderr, while the block runs."""
    if not sys.stderr.isatty():
        yield _Lines(label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    # a long window: steps and validations take turns, and the time left must not jump with them
    with Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=600) as shown:
        task = shown.add_task(label, total=None, note="")
        totals: set[int] = set()

        def report(done: int, total: int, note: str) -> None:
            if total not in totals:
                totals.add(total)
                shown.reset(task, total=total)
            shown.update(task, completed=done, total=total, note=note)

        yield report


class _Lines:
    """Lines such as `nano  120/3000  0:42:10 left  loss 0.812`, at most one in `QUIET` seconds, and one at the end
    of long work."""

    def __init__(self, label: str) -> None:
        self.label, self._first, self._printed, self._total = label, 0, 0.0, 0
        self._began: float | None = None

    def __call__(self, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if self._began is None or total != self._total:  # work may be resumed: the pace is that of what is done from here on
            self._began = self._printed = now
            self._first, self._total = done, total
        last = done >= total and now - self._began >= QUIET  # short work needs no line at all
        if now - self._printed < QUIET and not last:
            return
        self._printed = now
        pace = (now - self._began) / max(1, done - self._first)
        left = timedelta(seconds=int(pace * (total - done)))
        print(f"{self.label}  {done}/{total}  {left} left  {note}".rstrip(), file=sys.stderr, flush=True)
