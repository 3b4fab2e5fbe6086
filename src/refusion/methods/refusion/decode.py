"""The decoder: "select and infill" (docs/algorithm.md; paper, section 3.3). A generator that knows no model
(`methods.base`).

A round, with slots 0, 1, 3 open in the block and k = 2 (all positions relative to the response):

    select     rows   M0 M1  M2 M3  M6 M7         one segment, causal; drafts are asked at every row
    choose     slots 0 and 3 are over the slot threshold
    verify     rows   d0 d1  d6 d7 | M2 M3        drafts, and behind them the masks of what stays open
    accepted   all:  keep d0 d1 d6 d7; the outputs at M2 M3 are the next selection already ("Fusing")
               d7 refused: keep d0 d1 (slot 0 is whole); slot 3 is open again; the outputs at M2 M3 are thrown away
               d1 refused: complete. Slots 0 and 3 are finished side by side, each a segment of its own:
                   re-draft   d0 M1 | d6 d7         verify   d0 e1 | d6 d7         keep all of the last forward
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from refusion.config import DecodeConfig
from refusion.events import Committed, Drafted, Event, Finished, Selected, Verified
from refusion.methods.base import Answer, Decoder, Forward, TokenIds
from refusion.methods.refusion.select import choose, score, sureness
from refusion.methods.refusion.verify import accepted_run, cut_at_end, judge
from refusion.sampling import Shaping, uniform
from refusion.slots import Layout

Drafts = dict[int, tuple[list[int], list[float]]]  # slot -> drafted tokens, how sure each is
T = TypeVar("T")
Move = Generator[Forward | Event, Answer | None, T]  # a part of the decoder that returns a T


def decode(prompt: Sequence[int], settings: DecodeConfig, ids: TokenIds, *, fuse: bool = True) -> Decoder:
    """Write a response to `prompt` (token ids, at least one).

    settings: resolved, nothing unset. fuse: put the masks of the next selection behind the drafts in verify; it changes
    the number of forwards and rows, never a token.
    """
    state = _Decoding(prompt, settings, ids, fuse)
    for block in range(state.layout.blocks):
        while state.open_slots(block):
            yield from state.select(block)
            chosen = yield from state.choose()
            unfinished = yield from state.verify(chosen, block)
            if unfinished:
                yield from state.complete(unfinished)
            state.round += 1
    yield state.finished()


@dataclass
class _Slot:
    """A chosen slot while it is being completed: `tokens` accepted so far, out of `length`."""

    index: int
    start: int
    length: int
    tokens: list[int]
    full: bool


@dataclass
class _Decoding:
    """What is known between two forwards."""

    prompt: Sequence[int]
    settings: DecodeConfig
    ids: TokenIds
    fuse: bool
    round: int = 0
    drafts: Drafts = field(default_factory=dict)  # of the slots that are open, for the coming round
    _written: dict[int, int] = field(default_factory=dict)  # position -> token
    _done: set[int] = field(default_factory=set)  # slots
    _end: int | None = None  # position of the first end-of-sequence
    _keep: tuple[int, ...] = ()  # rows of the last forward that are to be found in the cache by the next one

    def __post_init__(self) -> None:
        s = self.settings
        assert len(self.prompt) > 0 and self.ids.mask is not None
        assert s.max_new_tokens and s.slot_size and s.block_size and s.seed is not None
        assert s.slot_threshold is not None and s.token_threshold is not None
        assert s.temperature is not None and s.top_k is not None and s.top_p is not None
        self.layout = Layout(s.max_new_tokens, s.slot_size, s.block_size)
        assert s.slot_order is not None and s.slot_score is not None and s.recompute is not None
        self.slot_order, self.slot_score, self.recompute = s.slot_order, s.slot_score, s.recompute
        self.measure = "entropy" if s.slot_score == "entropy" else "probability"
        self.mask, self.seed = self.ids.mask, s.seed
        self.slot_threshold, self.token_threshold = s.slot_threshold, s.token_threshold
        self.shaping = Shaping(s.temperature, s.top_k, s.top_p)
        self.eos = frozenset() if s.ignore_eos else frozenset(self.ids.eos)
        self._pending = list(self.prompt)  # prompt tokens that no forward has seen yet

    def open_slots(self, block: int) -> list[int]:
        """Slots of a block that are still to be written: not done, and not after the end."""
        last = self.layout.slots if self._end is None else self.layout.slot_of(self._end)
        return [slot for slot in self.layout.block(block) if slot not in self._done and slot <= last]

    # --- the four moves ---

    def select(self, block: int) -> Move[None]:
        """Draft every open slot of the block, unless the last verify did so already."""
        if not self.drafts:
            rows = _Rows()
            for i, token in enumerate(self._pending):
                rows.add(token, i - len(self.prompt))
            first = len(rows.tokens)
            self._add_masks(rows, self.open_slots(block), self.round)
            answer = yield from self._forward(rows)
            self._keep, self._pending = tuple(range(len(self._pending))), []
            self._read_drafts(answer, rows.positions[first:])
        yield Drafted(self.round, *self._drafted)

    def choose(self) -> Move[list[int]]:
        """The slots over the slot threshold, or the best one."""
        slots = list(self.drafts)
        scores = [score(self.drafts[slot][1], self.slot_score) for slot in slots]
        chosen = choose(scores, self.slot_threshold, self.slot_order)
        yield Selected(self.round, tuple(slots[i] for i in chosen), tuple(scores[i] for i in chosen))
        return [slots[i] for i in chosen]

    def verify(self, chosen: list[int], block: int) -> Move[list[_Slot]]:
        """One forward over all chosen drafts; commits the leading whole slots, or all up to an accepted end. If there
        is nothing to commit, returns the chosen slots with the tokens that each may keep."""
        rows = _Rows()
        for slot in chosen:
            rows.add_checked(self.drafts[slot][0], self.layout.positions(slot).start, 0)
        tokens, positions = list(rows.tokens), list(rows.positions)
        if self.fuse:
            self._add_masks(rows, self._open_after(chosen, block), self.round + 1)
        answer = yield from self._forward(rows)
        probabilities = rows.checked_probabilities(answer)
        lengths = [len(self.layout.positions(slot)) for slot in chosen]
        verdict = judge(tokens, probabilities, lengths, self.token_threshold, self.eos)
        yield self._verified(positions, tokens, probabilities, verdict.accepted)
        self.drafts = {}
        if not verdict.committed:
            return self._begun(chosen, tokens, probabilities)
        self._keep = tuple(range(verdict.committed))
        yield self._commit(positions[: verdict.committed], tokens[: verdict.committed])
        if verdict.committed == len(tokens) and not verdict.ended:
            self._read_drafts(answer, rows.positions[len(tokens) :])
        return []

    def complete(self, slots: list[_Slot]) -> Move[None]:
        """Finish every chosen slot on its own: re-draft what follows its accepted run, verify, until all are full."""
        turn = 0
        while not all(slot.full for slot in slots):
            turn += 1
            redrafted = yield from self._redraft(slots, turn)
            slots, rows = yield from self._reverify(slots, redrafted)
        self._keep = tuple(row for slot in slots for row in rows[slot.index][: len(slot.tokens)])
        positions = [slot.start + i for slot in slots for i in range(len(slot.tokens))]
        tokens = [token for slot in slots for token in slot.tokens]
        if self.recompute and len(slots) > 1:
            yield from self._recompute(tokens, positions)
        yield self._commit(positions, tokens)

    # --- complete, in detail ---

    def _begun(self, chosen: list[int], tokens: list[int], probabilities: list[float | None]) -> list[_Slot]:
        """The chosen slots, each with its own leading run of accepted tokens, as the joint verify saw them."""
        slots, first = [], 0
        for index in chosen:
            positions = self.layout.positions(index)
            end = first + len(positions)
            run = accepted_run(probabilities[first:end], self.token_threshold)
            slot = _Slot(index, positions.start, len(positions), [], False)
            self._extend(slot, tokens[first : first + run])
            slots.append(slot)
            first = end
        return _until_ended(slots, self.eos)

    def _extend(self, slot: _Slot, tokens: Sequence[int]) -> None:
        """Accept tokens; end-of-sequence makes a slot full."""
        slot.tokens += tokens
        end = cut_at_end(slot.tokens, self.eos)
        if end is not None:
            slot.tokens = slot.tokens[:end]
        slot.full = end is not None or len(slot.tokens) == slot.length

    def _redraft(self, slots: list[_Slot], turn: int) -> Move[dict[int, list[int]]]:
        """One forward of run + masks for every slot that is not full; returns the new tokens by slot."""
        rows = _Rows()
        unfinished = [slot for slot in slots if not slot.full]
        for slot in unfinished:
            for i in range(slot.length):
                known = i < len(slot.tokens)
                rows.add(slot.tokens[i] if known else self.mask, slot.start + i, slot.index)
                if not known:
                    self._ask_draft(rows, self.round, turn)
        answer = yield from self._forward(rows)
        positions = tuple(rows.positions[row] for row in rows.drafts)
        yield Drafted(self.round, positions, answer.tokens, answer.probabilities)
        tokens = iter(answer.tokens)
        return {s.index: [next(tokens) for _ in range(s.length - len(s.tokens))] for s in unfinished}

    def _reverify(
        self, slots: list[_Slot], redrafted: dict[int, list[int]]
    ) -> Move[tuple[list[_Slot], dict[int, range]]]:
        """One forward of run + new drafts; full slots come along, so that all keys and values stand in one forward."""
        rows, where, spans = _Rows(), {}, {}
        for slot in slots:
            first = len(rows.tokens)
            known, asked = len(slot.tokens), len(rows.checks)
            drafts = redrafted.get(slot.index, [])
            rows.add_checked([*slot.tokens, *drafts], slot.start, slot.index, known + 1)
            where[slot.index] = range(first, len(rows.tokens))
            spans[slot.index] = slice(asked, len(rows.checks))
        answer = yield from self._forward(rows)
        for slot in slots:
            if not slot.full:
                drafts = redrafted[slot.index]
                probabilities = [None, *answer.checks[spans[slot.index]]]
                accepted = accepted_run(probabilities, self.token_threshold)
                positions = [slot.start + len(slot.tokens) + i for i in range(len(drafts))]
                yield self._verified(positions, drafts, probabilities, accepted)
                self._extend(slot, drafts[:accepted])
        return _until_ended(slots, self.eos), where

    def _recompute(self, tokens: Sequence[int], positions: Sequence[int]) -> Move[None]:
        """Keys and values of all completed slots in one causal row (the paper's Table 8); the former ones are forgotten."""
        rows = _Rows()
        for token, position in zip(tokens, positions, strict=True):
            rows.add(token, position)
        self._keep = ()
        yield from self._forward(rows)
        self._keep = tuple(range(len(tokens)))

    # --- shared ---

    def _forward(self, rows: _Rows) -> Move[Answer]:
        answer = yield rows.request(len(self.prompt), self._keep, self.shaping, self.measure)
        assert answer is not None
        self._keep = ()
        return answer

    def _open_after(self, chosen: list[int], block: int) -> list[int]:
        """What will be open if all of `chosen` are accepted: the rest of the block, else the next block."""
        rest = [slot for slot in self.open_slots(block) if slot not in chosen]
        if not rest and block + 1 < self.layout.blocks:
            rest = self.open_slots(block + 1)
        return rest

    def _add_masks(self, rows: _Rows, slots: list[int], round: int) -> None:
        for slot in slots:
            for position in self.layout.positions(slot):
                rows.add(self.mask, position)
                self._ask_draft(rows, round, 0)

    def _ask_draft(self, rows: _Rows, round: int, turn: int) -> None:
        rows.drafts.append(len(rows.tokens) - 1)
        if self.shaping.temperature > 0:
            rows.uniforms.append(uniform(self.seed, round, turn, rows.positions[-1]))

    def _read_drafts(self, answer: Answer, positions: Sequence[int]) -> None:
        """Answers at masked positions -> drafts by slot."""
        self.drafts = {}
        self._drafted = (tuple(positions), answer.tokens, answer.probabilities)
        for position, token, one in zip(positions, answer.tokens, sureness(answer), strict=True):
            tokens, values = self.drafts.setdefault(self.layout.slot_of(position), ([], []))
            tokens.append(token)
            values.append(one)

    def _verified(
        self, positions: Sequence[int], tokens: Sequence[int], probabilities: Sequence[float | None], accepted: int
    ) -> Verified:
        return Verified(self.round, tuple(positions), tuple(tokens), tuple(probabilities), accepted)

    def _commit(self, positions: Sequence[int], tokens: Sequence[int]) -> Committed:
        for position, token in zip(positions, tokens, strict=True):
            self._written[position] = token
            self._done.add(self.layout.slot_of(position))
            if token in self.eos and (self._end is None or position < self._end):
                self._end = position
        return Committed(self.round, tuple(positions), tuple(tokens))

    def finished(self) -> Finished:
        """The tokens in position order up to end-of-sequence; what stands after it is dropped."""
        length = self.layout.length if self._end is None else self._end
        tokens = tuple(self._written[position] for position in range(length))
        return Finished("length" if self._end is None else "stop", tokens, self._end is not None)


def _until_ended(slots: list[_Slot], eos: frozenset[int]) -> list[_Slot]:
    """Chosen slots after one that holds end-of-sequence are dropped; the earlier ones stay."""
    ended = next((i for i, slot in enumerate(slots) if cut_at_end(slot.tokens, eos) is not None), len(slots))
    return slots[: ended + 1]


class _Rows:
    """Rows of one forward under construction; positions are relative to the response (the prompt's are negative)."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[int] = []
        self.drafts: list[int] = []
        self.checks: list[tuple[int, int]] = []
        self.uniforms: list[float] = []
        self._checked: list[bool] = []

    def add(self, token: int, position: int, segment: int = 0) -> None:
        self.tokens.append(token)
        self.positions.append(position)
        self.segments.append(segment)

    def add_checked(self, tokens: Sequence[int], start: int, segment: int, free: int = 1) -> None:
        """Tokens at consecutive positions; each but the first `free` is checked against the row before it."""
        for i, token in enumerate(tokens):
            self.add(token, start + i, segment)
            if i >= free:
                self.checks.append((len(self.tokens) - 2, token))
            self._checked.append(i >= free)

    def checked_probabilities(self, answer: Answer) -> list[float | None]:
        """For every row of `add_checked` its token's probability, or None where it was not checked."""
        checks: Iterator[float] = iter(answer.checks)
        return [next(checks) if checked else None for checked in self._checked]

    def request(self, prompt_len: int, keep: tuple[int, ...], shaping: Shaping, measure: str) -> Forward:
        return Forward(
            tuple(self.tokens), tuple(position + prompt_len for position in self.positions), tuple(self.segments),
            tuple(self.drafts), tuple(self.checks), tuple(self.uniforms), shaping, keep, score=measure,
        )  # fmt: skip
