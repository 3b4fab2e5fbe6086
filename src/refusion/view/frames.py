"""From a trace to pictures: a fold over its events, one frame a step. Pure data; how it looks is decided elsewhere.

A cell is what is known of one position. By hand, slots of 2 and an end-of-sequence $:

    step                        cells                                        chosen
    (start)                                                                  -
    drafted  0..3  a b c $      a? b? c? $?            ? a draft             -
    selected slots 0 and 1      a? b? c? $?                                  0, 1
    verified 3 of 4 hold        a+ b+ c+ $-            + holds, - refused    0, 1
    committed 0..1              a0 b0  .  .            0 the round, . open   -

A draft that is written in the very next step (token by token, every one is) gets no frame of its own: its probability is
kept in the written cell.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from refusion.events import Committed, Drafted, Event, Finished, Selected, Verified
from refusion.live import State
from refusion.view.trace import Trace

Kind = Literal["open", "draft", "accepted", "rejected", "written"]


@dataclass(frozen=True)
class Cell:
    """One position of the response."""

    kind: Kind
    token: int | None = None
    round: int | None = None  # that wrote it
    drafted: float | None = None  # probability when it was drafted
    verified: float | None = None  # probability given what stands before it


OPEN = Cell("open")


@dataclass(frozen=True)
class Frame:
    """The response after a step. Counters are of all steps so far; tokens include an end-of-sequence."""

    round: int
    forwards: int
    tokens: int
    note: str  # what happened in this step, for people
    cells: tuple[Cell, ...]  # of positions 0, 1, ...
    texts: tuple[str, ...]  # what to show for each cell; "" where the cell before it says it all, or nothing does
    chosen: tuple[int, ...] = ()  # slots that are being written

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0


def frames(trace: Trace) -> list[Frame]:
    """The state before the first step, and that after each."""
    fold = _Fold(trace)
    out = [fold.frame("the prompt, and nothing written yet")]
    for event, following in pairwise([*trace.events, None]):
        assert event is not None
        fold.add(event, following)
        if not _is_written_at_once(event, following):
            out.append(fold.frame(_note(event, fold)))
    return out


def rounds(trace: Trace) -> int:
    """Number of rounds, those without a commit included."""
    return max((event.round + 1 for event in trace.events if not isinstance(event, Finished)), default=0)


def _is_written_at_once(event: Event, following: Event | None) -> bool:
    return (
        isinstance(event, Drafted) and isinstance(following, Committed)
        and (event.positions, event.tokens) == (following.positions, following.tokens)
    )  # fmt: skip


class _Fold:
    """`live.State` keeps the counts; this keeps what it forgets: probabilities, and what became of a draft."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.state = State(trace.decode, trace.slot_size, trace.eos)
        self.cells: dict[int, Cell] = {}  # by position; what is not here is open
        self._ended: bool | None = None  # whether the finished response ended by end-of-sequence

    def add(self, event: Event, following: Event | None) -> None:
        self.state.add(event)
        if isinstance(event, Drafted):
            self._draft(event)
        elif isinstance(event, Verified):
            self._verify(event, following)
        elif isinstance(event, Committed):
            self._commit(event)
        elif isinstance(event, Finished):
            self._ended = event.eos
            self._forget_drafts()

    def _draft(self, event: Drafted) -> None:
        for position, token, probability in zip(event.positions, event.tokens, event.probabilities, strict=True):
            if position not in self.state.written:
                self.cells[position] = Cell("draft", token, drafted=probability)

    def _verify(self, event: Verified, following: Event | None) -> None:
        """Tokens after the accepted run are refused. But where a slot is re-drafted next, the others kept what held on its
        own, and what was refused is just what is drafted again."""
        refused = set(event.positions[event.accepted :])
        if isinstance(following, Drafted) and following.round == event.round:
            refused &= set(following.positions)
        for position, token, probability in zip(event.positions, event.tokens, event.probabilities, strict=True):
            kind: Kind = "rejected" if position in refused else "accepted"
            self.cells[position] = replace(self._known(position, token), kind=kind, verified=probability)

    def _commit(self, event: Committed) -> None:
        written = {
            position: replace(self._known(position, token), kind="written", round=event.round)
            for position, token in zip(event.positions, event.tokens, strict=True)
        }
        self._forget_drafts()
        self.cells |= written

    def _known(self, position: int, token: int) -> Cell:
        """The cell, if it is about this token."""
        cell = self.cells.get(position, OPEN)
        return cell if cell.token == token else Cell("draft", token)

    def _forget_drafts(self) -> None:
        self.cells = {position: cell for position, cell in self.cells.items() if cell.kind == "written"}

    def frame(self, note: str) -> Frame:
        extent, ended = self.state.extent, self._ended
        if ended is None:
            ended = any(token in self.trace.eos for token, _ in self.state.written.values())
        last = self.cells.get(extent, OPEN)
        shown = extent + (ended and last.kind == "written" and last.token in self.trace.eos)
        cells = tuple(self.cells.get(position, OPEN) for position in range(shown))
        return Frame(
            self.state.round, self.state.forwards, self.state.tokens + ended, note, cells, _texts(cells, self.trace),
            tuple(sorted(self.state.chosen)),
        )  # fmt: skip


# --- words


def _note(event: Event, fold: _Fold) -> str:
    """What happened, in a few words."""
    if isinstance(event, Drafted):
        again = "drafted again" if fold.state.chosen else "drafted"
        return f"{again} {_count(len(event.tokens), 'token')}{_in_slots(event.positions, fold.trace.slot_size)}"
    if isinstance(event, Selected):
        return f"selected {_named('slot', event.slots)}"
    if isinstance(event, Verified):
        return f"verified {_count(len(event.tokens), 'token')}: the first {event.accepted} hold"
    if isinstance(event, Committed):
        size = fold.trace.slot_size
        slots = sorted({position // size for position in event.positions}) if size else []
        where = f" in {_named('slot', slots)}" if slots else ""
        return f"wrote {_count(len(event.tokens), 'token')}{where}"
    why = "the model ended its answer" if event.eos else "at a stop string" if event.reason == "stop" else "out of room"
    return f"finished: {why}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _in_slots(positions: Sequence[int], size: int | None) -> str:
    return f" in {_count(len({position // size for position in positions}), 'slot')}" if size else ""


def _named(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers)) or 'none'}"


# --- texts


def _texts(cells: Sequence[Cell], trace: Trace) -> tuple[str, ...]:
    """One text a cell. Tokens that are only together a character: the first shows it."""
    raw = [None if cell.token is None else trace.token_text(cell.token) for cell in cells]
    out: list[str] = []
    for kind, group in groupby(raw, type):
        run = list(group)
        if kind is bytes:
            out += _characters([text for text in run if isinstance(text, bytes)])
        else:
            out += [visible(text) if isinstance(text, str) else "" for text in run]
    return tuple(out)


def _characters(run: Sequence[bytes]) -> Iterator[str]:
    """The shortest groups of tokens that are whole characters; other bytes by their numbers, as ⟨E2⟩."""
    start = 0
    while start < len(run):
        for end in range(start + 1, min(start + 4, len(run)) + 1):  # no character has more than four bytes
            try:
                whole = b"".join(run[start:end]).decode()
            except UnicodeDecodeError:
                continue
            break
        else:
            lone = run[start].decode(errors="surrogateescape")
            whole, end = "".join(f"⟨{ord(c) - 0xDC00:02X}⟩" if "\udc80" <= c <= "\udcff" else c for c in lone), start + 1
        yield visible(whole)
        yield from [""] * (end - start - 1)
        start = end


def visible(text: str) -> str:
    """Text that can stand anywhere: numbers, as ⟨1B⟩, for what would move a cursor or turn the direction of writing, and a
    sign for what is no character. Line breaks and tabs stay."""
    return text if text.isascii() and text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    kind = unicodedata.category(character)
    if character in "\n\t" or kind not in ("Cc", "Cf", "Cs", "Zl", "Zp") or character == "\u200d":  # joins emoji
        return character
    return "\ufffd" if kind == "Cs" else f"⟨{ord(character):02X}⟩"
