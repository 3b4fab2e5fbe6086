"""Draws docs/order.svg: one real generation, every token a cell, shaded by the round that wrote it.

python benchmarks/picture.py [--model nano] [--prompt TEXT] [--out docs/order.svg]
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

import refusion
from refusion.events import Committed, Event
from refusion.models.tokenizer import Tokenizer

PROMPT = "Define f(xs): keep the even ones, keep those under 7, square each, return the sum."
SHADES = ("#0b3c5d", "#1f6f8b", "#3a9d9b", "#76b947", "#c9b037", "#e07b39", "#b5446e", "#6b4e9b")
CELL, GAP, LINE, LEFT = 8.4, 3, 34, 12


def rounds(events: tuple[Event, ...]) -> dict[int, int]:
    """Position -> round that wrote it."""
    return {p: e.round for e in events if isinstance(e, Committed) for p in e.positions}


def picture(prompt: str, result: refusion.Result, tokenizer: Tokenizer, slot_size: int) -> str:
    """An SVG page: a row of cells for every slot, numbered by round."""
    written = rounds(result.events)
    order = {number: i for i, number in enumerate(sorted(set(written.values())))}
    parts, width, y = [], 0.0, 64
    for start in range(0, len(result.token_ids), slot_size):
        ids = result.token_ids[start : start + slot_size]
        shade = SHADES[order[written[start]] % len(SHADES)]
        x = LEFT + 74.0
        parts.append(f'<text x="{LEFT}" y="{y + 16}" class="n">round {order[written[start]] + 1}</text>')
        for token in ids:
            text = tokenizer.decode([token]).replace("\n", "↵").replace(" ", "·")
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
    prompt_line = f'<text x="{LEFT}" y="24" class="p">{escape(prompt)}</text>'
    prompt_line += (
        f'<text x="{LEFT}" y="46" class="n">a row is a slot of {slot_size} tokens; colour = round that wrote it</text>'
    )
    return head + prompt_line + "".join(parts) + f'<text x="{LEFT}" y="{y + 14}">{line}</text></svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--out", type=Path, default=Path("docs/order.svg"))
    options = parser.parse_args()
    model = refusion.load(options.model)
    result = model.generate(options.prompt, refusion.DecodeConfig())
    options.out.write_text(
        picture(options.prompt, result, model.tokenizer, result.settings["slot_size"]), encoding="utf-8"
    )
    print(options.out, result.text)


if __name__ == "__main__":
    main()
