"""One answer as a picture: its slots in the order in which they were written.

Contract: a pure function of a result; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from refusion.events import Committed, Event
from refusion.generate import Result

MOST_PROMPT = 110  # characters that are shown
SHADES = ("#0b3c5d", "#1f6f8b", "#3a9d9b", "#76b947", "#c9b037", "#e07b39", "#b5446e", "#6b4e9b")
CELL, GAP, LINE, LEFT = 8.4, 3, 34, 12


def _rounds(events: tuple[Event, ...]) -> dict[int, int]:
    """Position -> round that wrote it."""
    return {p: e.round for e in events if isinstance(e, Committed) for p in e.positions}


def _one_line(text: str, most: int) -> str:
    """A prompt on one line of bearable length."""
    line = _printable(" ".join(text.split()))
    return line if len(line) <= most else line[: most - 4] + " ..."


def _printable(text: str) -> str:
    """What is no character in a picture, by a sign for that."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def order(prompt: str, result: Result, decode: Callable[[list[int]], str]) -> str:
    """An SVG picture: a row of cells for every slot, one for every token, numbered and coloured by the round that wrote it.

    result: of a method with slots. decode: token ids -> text.
    """
    slot_size = result.settings["slot_size"]
    written = _rounds(result.events)
    place = {number: i for i, number in enumerate(sorted(set(written.values())))}
    asked = _one_line(prompt, MOST_PROMPT)
    parts: list[str] = []
    width, y = LEFT + len(asked) * 7.9, 64
    for start in range(0, len(result.token_ids), slot_size):
        ids = result.token_ids[start : start + slot_size]
        shade = SHADES[place[written[start]] % len(SHADES)]
        x = LEFT + 74.0
        parts.append(f'<text x="{LEFT}" y="{y + 16}" class="n">round {place[written[start]] + 1}</text>')
        for token in ids:
            text = _printable(decode([token]).replace("\n", "↵").replace(" ", "·"))
            cell = max(2, len(text)) * CELL + 6
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{cell:.1f}" height="24" rx="4" fill="{shade}"/>')
            parts.append(f'<text x="{x + 3:.1f}" y="{y + 17}" class="t">{escape(text)}</text>')
            x += cell + GAP
        width, y = max(width, x), y + LINE
    stats = result.stats
    line = f"{stats.tokens} tokens in {stats.forwards} forwards: {stats.tokens_per_forward:.1f} tokens per forward"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + LEFT:.0f}" height="{y + 26}" '
        f'viewBox="0 0 {width + LEFT:.0f} {y + 26}" role="img">'
        "<title>Slots in the order in which they were written</title>"
        "<style>text{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px;fill:#666}"
        ".t{fill:#fff;white-space:pre}.n{font-size:12px}.p{fill:#888}</style>"
    )
    above = (
        f'<text x="{LEFT}" y="24" class="p">{escape(asked)}</text>'
        f'<text x="{LEFT}" y="46" class="n">a row is a slot of {slot_size} tokens; colour = round that wrote it</text>'
    )
    return head + above + "".join(parts) + f'<text x="{LEFT}" y="{y + 14}">{line}</text></svg>\n'
