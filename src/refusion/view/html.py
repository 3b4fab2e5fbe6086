"""A trace as one page that needs nothing else: style, program and data stand in it, and its policy forbids any request.

The page gets the first step whole and every other one as what changed; `page.js` plays them. Whatever a trace holds
reaches the page as text: through escaping in the markup, through `textContent` in the program.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from importlib import resources
from itertools import pairwise
from typing import Any

import jinja2

from refusion.view.frames import OPEN, Cell, Frame, frames, rounds, visible
from refusion.view.trace import Trace

KINDS = ("open", "draft", "accepted", "rejected", "written")  # page.js knows them by number
SLOTS_STEP, TOKEN_STEP = 700, 90  # milliseconds that a step is shown at speed 1

Shown = tuple[Cell, str]


def page(trace: Trace, speed: float = 1.0) -> str:
    """The whole page. speed: what it plays at until another is chosen."""
    parts = {name: _part(name) for name in ("page.html", "page.css", "page.js")}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(parts["page.html"]).render(
        model=visible(trace.model), prompt=visible(trace.prompt), answer=_answer(trace), figures=trace.figures(),
        settings={visible(str(k)): visible(str(v)) for k, v in trace.settings.items()}, complete=trace.complete,
        slots=trace.slot_size is not None, css=parts["page.css"], js=parts["page.js"], data=data(trace, speed),
        css_hash=_hash(parts["page.css"]), js_hash=_hash(parts["page.js"]),
    )  # fmt: skip


def data(trace: Trace, speed: float = 1.0) -> dict[str, Any]:
    """What page.js plays. A change is [position, kind, text, token, round, drafted, verified]."""
    steps = frames(trace)
    return {
        "slotSize": trace.slot_size,
        "eos": sorted(trace.eos),
        "rounds": rounds(trace),
        "stepSeconds": (SLOTS_STEP if trace.slot_size else TOKEN_STEP) / 1000,
        "speed": speed,
        "frames": [
            {
                "round": after.round, "forwards": after.forwards, "tokens": after.tokens, "note": after.note,
                "chosen": after.chosen, "length": len(after.cells), "changes": list(changes(before, after)),
            }
            for before, after in pairwise([None, *steps])
            if after is not None
        ],
    }  # fmt: skip


def changes(before: Frame | None, after: Frame) -> Iterator[list[Any]]:
    """The cells of `after` that are not as they were; what is beyond its end is not named."""
    old = dict(enumerate(zip(before.cells, before.texts, strict=True))) if before is not None else {}
    for position, (cell, text) in enumerate(zip(after.cells, after.texts, strict=True)):
        if old.get(position, (OPEN, "")) != (cell, text):
            numbers = (None if p is None else float(f"{p:.4g}") for p in (cell.drafted, cell.verified))
            yield [position, KINDS.index(cell.kind), text, cell.token, cell.round, *numbers]


def _answer(trace: Trace) -> str:
    """The text for who has no JavaScript."""
    if trace.text is not None:
        return visible(trace.text)
    return "".join(frames(trace)[-1].texts)


def _part(name: str) -> str:
    return resources.files("refusion.view").joinpath(name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    """How a policy names the one style and the one program that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
