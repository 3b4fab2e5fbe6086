"""A trace on a terminal, drawn as `refusion generate --live` draws; plain lines where there is none."""

from __future__ import annotations

import sys
from typing import TextIO

from refusion.live import LiveView
from refusion.view.frames import visible
from refusion.view.trace import Trace

SLOTS_DELAY, TOKEN_DELAY = 0.8, 0.12  # seconds that a round is shown: a round of many tokens takes longer to read


def replay(trace: Trace, speed: float = 1.0, stream: TextIO | None = None) -> None:
    """Show the steps one after the other. speed: 2 is twice as fast. stream: default stdout."""
    out = sys.stdout if stream is None else stream
    delay = (SLOTS_DELAY if trace.slot_size else TOKEN_DELAY) / speed
    if out.isatty():
        print(visible(trace.prompt), end="\n\n", file=out, flush=True)
    with LiveView(trace.decode, slot_size=trace.slot_size, eos=trace.eos, delay=delay, stream=out) as view:
        for event in trace.events:
            view.add(event)
