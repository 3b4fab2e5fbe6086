"""Progress where there is no terminal: few lines, the pace of this run only, a line at the end."""

from __future__ import annotations

import pytest

from refusion import progress


def test_lines_are_few_and_say_what_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 10))  # every call comes 10 seconds after the one before
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.bar("nano") as report:
        for done in range(100, 111):
            report(done, 110, f"loss {done}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "nano  103/110  0:01:10 left  loss 103",
        "nano  106/110  0:00:40 left  loss 106",
        "nano  109/110  0:00:10 left  loss 109",
        "nano  110/110  0:00:00 left  loss 110",
    ]
