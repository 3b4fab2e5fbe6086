"""A trace as an animated GIF, one picture a step, drawn with Pillow (the extra `view`).

All pictures are of one size, so the layout of every step is made first. The typeface is a monospaced one of the system where
there is one, else the one that Pillow brings, which lacks most signs: they become boxes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from refusion.config import UserError
from refusion.view.frames import Cell, Frame, frames, rounds, visible
from refusion.view.trace import Trace

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

    Font = FreeTypeFont | ImageFont

Colour = tuple[int, int, int]

WIDTH, MARGIN, LINE, MOST_LINES, MOST_PROMPT_LINES = 880, 28, 30, 32, 4
SLOTS_STEP, TOKEN_STEP, LAST_STEP = 700, 90, 4000  # milliseconds that a picture stays
FONTS = ("DejaVuSansMono.ttf", "Menlo.ttc", "consola.ttf")  # of Linux, macOS, Windows
PAPER, INK, SOFT, FAINT, RULE = (255, 254, 251), (29, 28, 26), (106, 102, 94), (150, 145, 136), (226, 223, 216)
ACCENT, HOLDS, REFUSED = (47, 91, 208), (27, 122, 67), (179, 38, 30)
DRAFT_INK: dict[str, Colour] = {"open": FAINT, "draft": FAINT, "accepted": INK, "rejected": REFUSED}


@dataclass(frozen=True)
class Piece:
    """A part of a token's text that stands on one line."""

    position: int
    line: int
    x: float
    width: float
    text: str


def animation(trace: Trace, speed: float = 1.0) -> bytes:
    """The file's content. speed: 2 is twice as fast. Raises `UserError` where there is no Pillow."""
    try:
        import PIL.Image
    except ImportError:
        raise UserError("--gif needs Pillow: pip install 'refusion[view]'") from None
    steps = frames(trace)
    step = max(20, round((SLOTS_STEP if trace.slot_size else TOKEN_STEP) / speed))  # browsers slow what is shorter down
    pictures = _Painter(trace, steps).pictures()
    first, out = next(pictures), io.BytesIO()
    PIL.Image.Image.save(
        first, out, "GIF", save_all=True, append_images=pictures, duration=[step] * (len(steps) - 1) + [LAST_STEP],
        loop=0, disposal=1,
    )  # fmt: skip
    return out.getvalue()


def layout(texts: Sequence[str], widths: Any, room: float) -> list[Piece]:
    """Break texts into lines: at line breaks, and before a token that does not fit; one longer than a line is cut.

    widths: text -> its width.
    """
    pieces: list[Piece] = []
    x, line = 0.0, 0
    for position, text in enumerate(texts):
        for i, part in enumerate(text.expandtabs(4).split("\n")):
            if i:
                x, line = 0.0, line + 1
            while part:
                width = widths(part)
                if x + width <= room:
                    pieces.append(Piece(position, line, x, width, part))
                    x += width
                    break
                if x == 0:  # longer than a line
                    kept = next((n for n in range(len(part), 1, -1) if widths(part[:n]) <= room), 1)
                    pieces.append(Piece(position, line, x, widths(part[:kept]), part[:kept]))
                    part = part[kept:]
                x, line = 0.0, line + 1
    return pieces


class _Painter:
    """Draws the steps of one trace."""

    def __init__(self, trace: Trace, steps: Sequence[Frame]) -> None:
        self.trace, self.steps, self.rounds = trace, steps, rounds(trace)
        self.body, self.small, self.large = _font(17), _font(13), _font(20)
        self.width = lru_cache(maxsize=None)(self.body.getlength)
        room = WIDTH - 2 * MARGIN
        self.prompt = _lines(layout([visible(trace.prompt)], self.small.getlength, room))
        if len(self.prompt) > MOST_PROMPT_LINES:
            self.prompt = [*self.prompt[: MOST_PROMPT_LINES - 1], self.prompt[MOST_PROMPT_LINES - 1] + " ..."]
        self.layouts = [layout(_shown(frame), self.width, room) for frame in steps]
        lines = max((piece.line + 1 for pieces in self.layouts for piece in pieces), default=1)
        self.lines = max(2, min(MOST_LINES, lines))
        self.top = MARGIN + 20 * len(self.prompt) + 20
        self.bottom = self.top + self.lines * LINE + 12  # of the response
        self.height = self.bottom + (118 if self.trace.slot_size else 96)

    def pictures(self) -> Iterator[Image]:
        """The pictures one by one, with one palette: that of a step in which all colours of rounds appear."""
        from PIL.Image import Dither

        palette = self._palette()
        for number, (frame, pieces) in enumerate(zip(self.steps, self.layouts, strict=True)):
            yield self._picture(number, frame, pieces).quantize(palette=palette, dither=Dither.NONE)

    def _palette(self) -> Image:
        """Every colour on paper, and the shades between, in which the edges of letters are drawn."""
        import PIL.Image

        kept = sorted({round(i * (self.rounds - 1) / 15) for i in range(16)}) if self.rounds > 16 else range(self.rounds)
        pairs = [(ink, PAPER) for ink in (INK, SOFT, FAINT, RULE, ACCENT, HOLDS, REFUSED)]
        for number in kept:
            pairs += [(_ink(self._turn(number)), _wash(self._turn(number))), (_wash(self._turn(number)), PAPER)]
        shades = {PAPER: None, (255, 255, 255): None}
        for ink, ground in pairs:
            steps = 7 if ground == PAPER and ink in (INK, SOFT, FAINT) else 5
            shades |= dict.fromkeys(_mix(ink, ground, i / (steps - 1)) for i in range(steps))
        flat = [value for shade in list(shades)[:256] for value in shade]
        palette = PIL.Image.new("P", (1, 1))
        palette.putpalette(flat + list(PAPER) * (256 - len(flat) // 3))
        return palette

    def _turn(self, number: int) -> float:
        """Where a round stands between the first (0) and the last (1)."""
        return number / (self.rounds - 1) if self.rounds > 1 else 0.0

    def _picture(self, number: int, frame: Frame, pieces: Sequence[Piece]) -> Image:
        import PIL.Image
        import PIL.ImageDraw

        image = PIL.Image.new("RGB", (WIDTH, self.height), PAPER)
        draw = PIL.ImageDraw.Draw(image)
        for i, line in enumerate(self.prompt):
            draw.text((MARGIN, MARGIN + 20 * i - 8), line, SOFT, self.small)
        draw.line((MARGIN, self.top - 12, WIDTH - MARGIN, self.top - 12), RULE)
        hidden = max((piece.line + 1 for piece in pieces), default=0) - self.lines  # what is too long scrolls
        seen = [piece for piece in pieces if piece.line >= hidden]
        lift = self.top - max(0, hidden) * LINE
        for piece in seen:
            self._token(draw, piece, frame.cells[piece.position], lift)
        self._frames_of_slots(draw, frame, seen, lift)
        self._foot(draw, number, frame)
        return image

    def _token(self, draw: ImageDraw, piece: Piece, cell: Cell, lift: int) -> None:
        left, right, y = MARGIN + piece.x, MARGIN + piece.x + piece.width, lift + piece.line * LINE
        ink = DRAFT_INK.get(cell.kind, INK)
        if cell.kind == "written":
            assert cell.round is not None
            turn = self._turn(cell.round)
            ink = _ink(turn)
            draw.rectangle((left, y, right - 1, y + LINE - 7), _wash(turn))
        draw.text((left, y + LINE / 2 - 3), piece.text, ink, self.body, anchor="lm")
        if cell.kind == "rejected":
            draw.line((left, y + LINE / 2 - 3, right, y + LINE / 2 - 3), REFUSED, 2)
        if cell.kind == "accepted":
            draw.line((left, y + LINE - 9, right, y + LINE - 9), HOLDS, 2)

    def _frames_of_slots(self, draw: ImageDraw, frame: Frame, pieces: Sequence[Piece], lift: int) -> None:
        """A box around every selected slot, one a line."""
        size, boxes = self.trace.slot_size or 1, dict[tuple[int, int], list[float]]()
        for piece in pieces:
            slot = piece.position // size
            if slot in frame.chosen:
                box = boxes.setdefault((slot, piece.line), [piece.x, piece.x])
                box[1] = piece.x + piece.width
        for (_, line), (left, right) in boxes.items():
            y = lift + line * LINE
            draw.rectangle((MARGIN + left - 2, y - 3, MARGIN + right + 1, y + LINE - 4), outline=ACCENT, width=2)

    def _foot(self, draw: ImageDraw, number: int, frame: Frame) -> None:
        """How far it is, the counters, and what happened."""
        y, right = self.bottom + 12, WIDTH - MARGIN
        last = max(1, len(self.steps) - 1)
        for i in range(self.rounds):
            left, end = (MARGIN + (right - MARGIN) * k / self.rounds for k in (i, i + 1))
            done = i < frame.round or number == len(self.steps) - 1 or (i == frame.round and number > 0)
            turn = self._turn(i)
            draw.rectangle((left, y, max(left, end - (2 if self.rounds <= 60 else 0)), y + 7),
                           _ink(turn) if done else _wash(turn))  # fmt: skip
        counters = (
            f"round {frame.round}   forwards {frame.forwards}   tokens {frame.tokens}   "
            f"tokens per forward {frame.tokens_per_forward:.2f}"
        )
        draw.text((MARGIN, y + 20), counters, INK, self.small)
        draw.text((right, y + 20), f"{number} / {last}", FAINT, self.small, anchor="ra")
        note = frame.note
        while self.small.getlength(note) > right - MARGIN:
            note = note[: -5] + "..."
        draw.text((MARGIN, y + 42), note, SOFT, self.small)
        if self.trace.slot_size:
            self._legend(draw, y + 64)

    def _legend(self, draw: ImageDraw, y: float) -> None:
        """How tokens look. The bar above shows the colours of the rounds."""
        x: float = MARGIN
        for word, ink in (("draft", FAINT), ("selected", FAINT), ("holds", INK), ("refused", REFUSED)):
            end = x + self.small.getlength(word)
            draw.text((x, y), word, ink, self.small)
            if word == "selected":
                draw.rectangle((x - 4, y - 3, end + 3, y + 17), outline=ACCENT, width=2)
            elif word != "draft":
                line = y + 17 if word == "holds" else y + 8
                draw.line((x, line, end, line), HOLDS if word == "holds" else REFUSED, 2)
            x = end + 26
        draw.text((x, y), "written: in the colour of its round", SOFT, self.small)


def _shown(frame: Frame) -> list[str]:
    return [
        "·" if cell.kind == "open" else text for cell, text in zip(frame.cells, frame.texts, strict=True)
    ]  # fmt: skip


def _lines(pieces: Sequence[Piece]) -> list[str]:
    """What stands on each line, empty ones included."""
    lines = [""] * (pieces[-1].line + 1 if pieces else 1)
    for piece in pieces:
        lines[piece.line] += piece.text
    return lines


def _font(size: int) -> Font:
    from PIL import ImageFont

    for name in FONTS:
        try:
            return ImageFont.truetype(name, size - 1)
        except OSError:
            continue
    return ImageFont.load_default(size)


# --- colours: as in page.css, from blue over green to red


def _ink(turn: float) -> Colour:
    return _oklch(0.46, 0.13, 265 - 245 * turn)


def _wash(turn: float) -> Colour:
    return _oklch(0.945, 0.035, 265 - 245 * turn)


def _mix(a: Colour, b: Colour, share: float) -> Colour:
    mixed = [round(x + (y - x) * share) for x, y in zip(a, b, strict=True)]
    return mixed[0], mixed[1], mixed[2]


def _oklch(lightness: float, chroma: float, hue: float) -> Colour:
    """To sRGB by the matrices of CSS Color 4 (section 10); what is outside is cut off."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    red, green, blue = (min(255, max(0, round(255 * _gamma(value)))) for value in linear)
    return red, green, blue


def _gamma(value: float) -> float:
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
