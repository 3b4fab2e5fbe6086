"""Watching a response being written: a fold over a decoder's events.

On a terminal the response is drawn in text order: drafts dim, committed text bright in the colour of the round that
wrote it, what is still open as dots, and above it one cell a slot with the number of that round. Elsewhere, one plain
line a committed slot, in the order in which they are written. Rounds, slots and positions count from 0, as in events.

Contract: this module is handed events and a function from token ids to text. It knows no model and no method.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from refusion.events import Committed, Drafted, Event, Finished, Selected, Verified

Decode = Callable[[Sequence[int]], str]

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")  # of the rounds, over and over
OPEN = "·"
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
# Control characters would move the cursor: they are shown as signs, but for the line break.
VISIBLE = {i: chr(0x2400 + i) for i in range(32) if i != 10} | {9: "    ", 127: "␡"}


@dataclass
class State:
    """What is known of a response after some of its events."""

    decode: Decode
    slot_size: int | None = None  # None: token by token
    eos: Collection[int] = ()  # ids that end the text; none if they are ignored
    round: int = 0
    forwards: int = 0
    written: dict[int, tuple[int, int]] = field(default_factory=dict)  # position -> token, round
    drafts: dict[int, int] = field(default_factory=dict)  # position -> token
    chosen: frozenset[int] = frozenset()  # slots that are being written
    seen: int = 0  # positions that any event has named: 0 .. seen - 1
    _last: Event | None = None
    _next_select_is_free: bool = False

    @property
    def extent(self) -> int:
        """Number of positions to show: all that were named, up to the first end-of-sequence."""
        end = min((p for p, (token, _) in self.written.items() if token in self.eos), default=self.seen)
        return min(end, self.seen)

    @property
    def tokens(self) -> int:
        """Written tokens, without those after the end."""
        extent = self.extent
        return sum(position < extent for position in self.written)

    def add(self, event: Event) -> None:
        """Take in the next event."""
        self._count(event)
        if isinstance(event, Finished):
            self.drafts, self.chosen, self.seen = {}, frozenset(), len(event.tokens)
        else:
            self.round = event.round
        if isinstance(event, Drafted | Committed):
            self.seen = max(self.seen, max(event.positions, default=-1) + 1)
        if isinstance(event, Drafted):
            self.drafts |= zip(event.positions, event.tokens, strict=True)
        elif isinstance(event, Selected):
            self.chosen = frozenset(event.slots)
        elif isinstance(event, Committed):
            self.drafts, self.chosen = {}, frozenset()  # the other drafts are forgotten
            for position, token in zip(event.positions, event.tokens, strict=True):
                self.written[position] = (token, event.round)
        self._last = event

    def _count(self, event: Event) -> None:
        """Count forwards: one for each selection, joint verify, re-draft and verify of complete (all slots in one).

        A selection right after a verify that accepted everything cost nothing: its masks stood behind those drafts.
        """
        if isinstance(event, Drafted):
            self.forwards += not self._next_select_is_free
            self._next_select_is_free = False
        elif isinstance(event, Verified) and not isinstance(self._last, Verified):
            self.forwards += 1
            whole = event.accepted == len(event.tokens) and not set(event.tokens) & set(self.eos)
            self._next_select_is_free = isinstance(self._last, Selected) and whole

    def slot(self, position: int) -> int:
        return position // (self.slot_size or 1)

    def rounds(self) -> list[int | None]:
        """For every slot to be shown the round that wrote it, or None."""
        extent = self.extent
        slots: list[int | None] = [None] * (self.slot(extent - 1) + 1 if extent else 0)
        for position, (_, round) in self.written.items():
            if position < extent:
                slots[self.slot(position)] = round
        return slots

    def runs(self) -> Iterator[tuple[str, int | None, str]]:
        """The response in text order as (kind, round, text); kind: "written", "draft" or "open"."""
        before: int | None = None
        for (kind, round), group in groupby(range(self.extent), self._kind):
            positions = list(group)
            if kind == "open":
                yield kind, None, OPEN * len(positions)
                before = None
                continue
            source = self.drafts if kind == "draft" else {p: token for p, (token, _) in self.written.items()}
            tokens = [source[position] for position in positions]
            yield kind, round, piece(self.decode, before, tokens)
            before = tokens[-1]

    def _kind(self, position: int) -> tuple[str, int | None]:
        if position in self.written:
            return "written", self.written[position][1]
        return ("draft" if position in self.drafts else "open"), None


def piece(decode: Decode, before: int | None, tokens: Sequence[int]) -> str:
    """Text of tokens that follow the token `before`: some tokenizers drop a space at the start of what they decode."""
    if before is None:
        return decode(tokens)
    head, whole = decode([before]), decode([before, *tokens])
    return whole[len(head) :] if whole.startswith(head) else decode(tokens)


def colour(round: int | None) -> str:
    return "dim" if round is None else f"bold {COLOURS[round % len(COLOURS)]}"


def frame(state: State, width: int, numbers: bool = False) -> Text:
    """One picture of the response. numbers: put the round before the text it wrote, for want of colours."""
    forwards = f"{state.forwards} forward" + "s" * (state.forwards != 1)
    picture = Text(f"round {state.round}  {forwards}  {state.tokens} tokens\n", overflow="fold")
    if state.slot_size is not None:
        picture.append_text(_strip(state, width))
    picture.append("\n")
    for kind, round, text in state.runs():
        if numbers and kind == "written" and state.slot_size is not None:
            picture.append(str(round).translate(SUPERSCRIPTS), "dim")
        picture.append(text.translate(VISIBLE), colour(round) if kind == "written" else "dim")
    return picture


def _strip(state: State, width: int) -> Text:
    """One cell a slot: the round that wrote it, `?` while it is being written, a dot before."""
    title = "slots (round written): "
    strip, column = Text().append(title, "dim"), len(title)
    for slot, round in enumerate(state.rounds()):
        cell = str(round) if round is not None else "?" if slot in state.chosen else OPEN
        if column + len(cell) + 1 > width > len(title):
            strip.append("\n" + " " * len(title))
            column = len(title)
        strip.append(f"{cell} ", colour(round))
        column += len(cell) + 1
    return strip.append("\n")


def commit_lines(event: Committed, state: State) -> Iterator[str]:
    """One line a slot that `event` commits; `state` has taken the event in already."""
    tokens = dict(zip(event.positions, event.tokens, strict=True))
    for slot, group in groupby(sorted(tokens), state.slot):
        positions = list(group)
        shown = [tokens[p] for p in positions if tokens[p] not in state.eos]
        before, _ = state.written.get(positions[0] - 1, (None, 0))
        text = json.dumps(piece(state.decode, before, shown), ensure_ascii=False)
        if state.slot_size is None:
            yield f"token {slot}  {text}"
        else:
            yield f"round {event.round}  slot {slot}  [{positions[0]}..{positions[-1]}]  {text}"


class LiveView:
    """Shows events as they come, and ends by itself.

    >>> with LiveView(tokenizer.decode, slot_size=8) as view:        # doctest: +SKIP
    ...     for event in model.stream("Work out (12+7)*3-8."):
    ...         view.add(event)
    """

    def __init__(
        self, decode: Decode, *, slot_size: int | None = None, eos: Collection[int] = (), delay: float = 0.12,
        stream: TextIO | None = None,
    ) -> None:  # fmt: skip
        """eos: ids that end the text. delay: seconds that a terminal shows a round. stream: default stderr."""
        self.state = State(decode, slot_size, eos)
        self.delay, self.stream = delay, stream if stream is not None else sys.stderr
        self._live: Live | None = None
        if self.stream.isatty() and os.environ.get("TERM") != "dumb":
            console = Console(file=self.stream, highlight=False)
            self._live = Live(
                Text(), console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )  # fmt: skip

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            print(file=self.stream)  # what follows stands apart from the picture

    def add(self, event: Event) -> None:
        """Show an event; on a terminal this takes at least half of `delay` for a selection and for a commit."""
        first_draft = isinstance(event, Drafted) and not self.state.chosen
        self.state.add(event)
        if self._live is None:
            if isinstance(event, Committed):
                for line in commit_lines(event, self.state):
                    print(line, file=self.stream, flush=True)
            return
        console = self._live.console
        self._live.update(frame(self.state, console.width, console.no_color), refresh=True)
        if first_draft or isinstance(event, Committed):
            time.sleep(self.delay / 2)
