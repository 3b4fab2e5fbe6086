"""The method, slow and literal: decoding as METHOD 4 says it, for tests only.

No cache, no fusing, no segments: before every forward the whole visible history is computed again. Committed tokens
keep the keys and values of the forward that committed them, so every committed token carries the set of tokens that it
saw, and the attention matrix is rebuilt from these sets (docs/traps.md, 3).

Contract: `decode` works on any function `probabilities(tokens, positions, visible) -> float32 [R, V]` (visible: bool
[R, R]). It shares no code with the decoder under test; only drawing (temperature > 0) uses `refusion.sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from refusion.config import DecodeConfig

Probabilities = Callable[[Sequence[int], Sequence[int], Tensor], Tensor]
Uniform = Callable[[int, int, int], float]  # (round, turn, response position) -> number in [0, 1)


@dataclass(frozen=True)
class Column:
    """One token of the buffer. `seen` holds buffer indices, its own among them."""

    token: int
    position: int
    seen: frozenset[int]


@dataclass(frozen=True)
class Commit:
    """One round's commit, in the order in which the tokens enter the buffer; positions relative to the response."""

    round: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    completed: bool  # by complete, not by the joint verify


@dataclass(frozen=True)
class Result:
    tokens: tuple[int, ...]  # in position order, without EOS
    finish_reason: str  # "stop" | "length"
    eos: bool
    forwards: int  # of an unfused decoder whose prompt shares the first select's forward
    rows: int  # all input rows of these forwards, prompt included
    rounds: int
    commits: tuple[Commit, ...]
    buffer: tuple[Column, ...]  # prompt and committed tokens, in the order of the cache
    margin: float  # least distance of anything that decided from deciding otherwise


def decode(
    probabilities: Probabilities,
    prompt: Sequence[int],
    settings: DecodeConfig,
    mask: int,
    eos: Collection[int] = (),
    barred: Collection[int] = (),
    uniform: Uniform | None = None,
) -> Result:
    """Decode one prompt. settings: resolved. barred: ids never drafted, besides `mask`. uniform: see `Uniform`."""
    oracle = _Oracle(probabilities, list(prompt), settings, mask, set(eos), set(barred) | {mask}, uniform)
    return oracle.run()


@dataclass
class _Oracle:
    probabilities: Probabilities
    prompt: list[int]
    settings: DecodeConfig
    mask: int
    eos: set[int]
    barred: set[int]
    uniform: Uniform | None
    buffer: list[Column] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)  # response position -> committed token
    commits: list[Commit] = field(default_factory=list)
    round: int = 0
    forwards: int = 0
    rows: int = 0
    margin: float = math.inf

    def __post_init__(self) -> None:
        if self.settings.ignore_eos:
            self.eos = set()
        for i, token in enumerate(self.prompt):
            self.buffer.append(Column(token, i, frozenset(range(i + 1))))
        n, k, b = self.settings.max_new_tokens, self.settings.slot_size, self.settings.block_size
        assert n is not None and k is not None and b is not None
        self.size = k
        self.slots = [list(range(i, min(i + k, n))) for i in range(0, n, k)]  # positions of each slot
        a_block = b // k
        every = list(range(len(self.slots)))
        self.blocks = [every[i : i + a_block] for i in range(0, len(every), a_block)]
        self.open = set(every)

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        self.rows += len(self.prompt)  # they stand in the first select's forward
        for block in self.blocks:
            while still_open := [slot for slot in block if slot in self.open]:
                self.one_round(still_open)
                self.round += 1
        tokens = [self.written[position] for position in sorted(self.written)]
        end = next((i for i, token in enumerate(tokens) if token in self.eos), None)
        output = tokens if end is None else tokens[:end]
        # Everything up to the end is there: nothing open was left behind.
        assert sorted(self.written)[: len(output)] == list(range(len(output)))
        reason = "length" if end is None else "stop"
        return Result(
            tuple(output), reason, end is not None, self.forwards, self.rows, self.round, tuple(self.commits),
            tuple(self.buffer), self.margin,
        )  # fmt: skip

    def one_round(self, still_open: list[int]) -> None:
        chosen, drafts = self.select(still_open)
        probability = self.verify(chosen, drafts)
        row = [position for slot in chosen for position in self.slots[slot]]
        prefix = self.leading(row, probability)
        end = next((i for i, position in enumerate(prefix) if drafts[position] in self.eos), None)
        whole = [slot for slot in chosen if set(self.slots[slot]) <= set(prefix)]
        if end is not None:
            self.commit({position: drafts[position] for position in prefix[: end + 1]}, completed=False)
        elif whole:
            keep = [position for slot in whole for position in self.slots[slot]]
            self.commit({position: drafts[position] for position in keep}, completed=False)
        else:
            runs = {slot: [drafts[p] for p in self.leading(self.slots[slot], probability)] for slot in chosen}
            tokens = self.complete(runs)
            several = len({position // self.size for position in tokens}) > 1
            if self.settings.recompute and several:
                self.forwards += 1
                self.rows += len(tokens)
            self.commit(tokens, completed=not (self.settings.recompute and several))

    # --- select, verify, complete ---------------------------------------------------------------------------------

    def select(self, still_open: list[int]) -> tuple[list[int], dict[int, int]]:
        """The chosen slots, ascending, and the draft token at each of their positions."""
        row = [position for slot in still_open for position in self.slots[slot]]
        out = self.forward([self.mask] * len(row), row, [0] * len(row))
        self.rows += len(row)
        draft = {position: self.draft(out[i], 0, position) for i, position in enumerate(row)}
        of_draft = {position: float(out[i][draft[position]]) for i, position in enumerate(row)}
        score = {slot: of_draft[self.slots[slot][0]] for slot in still_open}
        if self.settings.slot_score == "mean":
            score = {slot: math.fsum(of_draft[p] for p in self.slots[slot]) / len(self.slots[slot]) for slot in still_open}
        if self.settings.slot_score == "entropy":
            for slot in still_open:
                first = out[row.index(self.slots[slot][0])].tolist()
                score[slot] = math.exp(math.fsum(p * math.log(p) for p in first if p > 0))
        chosen = [slot for slot in still_open if self.exceeds(score[slot], self.settings.slot_threshold)]
        if self.settings.slot_order == "left_to_right":
            gap = next((slot for slot in still_open[1:] if slot not in chosen), len(self.slots))
            chosen = [slot for slot in still_open if slot == still_open[0] or slot < gap]
        if not chosen:
            best = max(still_open, key=lambda slot: (score[slot], -slot))
            self.note(min((score[best] - score[slot] for slot in still_open if slot != best), default=math.inf))
            chosen = [best]
        drafts = {position: draft[position] for slot in chosen for position in self.slots[slot]}
        for position in drafts:
            self.note_draft(out[row.index(position)], 0, position)
        return chosen, drafts

    def verify(self, chosen: list[int], drafts: dict[int, int]) -> dict[int, float]:
        """For each drafted position its probability given all that stands before it in the row of all chosen slots."""
        row = [position for slot in chosen for position in self.slots[slot]]
        out = self.forward([drafts[position] for position in row], row, [0] * len(row))
        self.rows += len(row)
        free = {self.slots[slot][0] for slot in chosen}  # accepted by the selection
        return self.checks(row, drafts, out, free)

    def complete(self, runs: dict[int, list[int]]) -> dict[int, int]:
        """Finish every chosen slot on its own; `runs` is what each keeps of its drafts. The tokens to commit."""
        beside = list(runs)
        runs = self.after_eos(runs)
        turn = 0
        while hungry := {slot: run for slot, run in runs.items() if not self.full(slot, run)}:
            turn += 1
            self.count_turn(beside, hungry, turn)
            runs = self.after_eos({**runs, **self.one_turn(hungry, turn)})
        return {p: token for slot in sorted(runs) for p, token in zip(self.slots[slot], runs[slot], strict=False)}

    def one_turn(self, runs: dict[int, list[int]], turn: int) -> dict[int, list[int]]:
        """Re-draft the suffix of every slot and verify it: each slot sees the buffer and itself, not its siblings."""
        row = [position for slot in runs for position in self.slots[slot]]
        group = [slot for slot in runs for _ in self.slots[slot]]
        kept = {p: token for slot, run in runs.items() for p, token in zip(self.slots[slot], run, strict=False)}
        out = self.forward([kept.get(position, self.mask) for position in row], row, group)
        drafts = dict(kept)
        for i, position in enumerate(row):
            if position not in kept:
                drafts[position] = self.draft(out[i], turn, position)
                self.note_draft(out[i], turn, position)
        out = self.forward([drafts[position] for position in row], row, group)
        first_new = {self.slots[slot][len(run)] for slot, run in runs.items()}
        probability = self.checks(row, drafts, out, free=set(kept) | first_new)
        return {slot: [drafts[p] for p in self.leading(self.slots[slot], probability)] for slot in runs}

    def count_turn(self, beside: list[int], hungry: dict[int, list[int]], turn: int) -> None:
        """Rows of a turn, counted as the recorded cases count them.

        There every slot that was chosen is a row of a batch to the end; both forwards of the first turn hold it whole,
        those of later turns start at the last token that every hungry slot has kept. This is convention, not method.
        """
        start = 0 if turn == 1 else min(len(run) for run in hungry.values()) - 1
        self.rows += 2 * sum(max(len(self.slots[slot]) - start, 0) for slot in beside)

    def after_eos(self, runs: dict[int, list[int]]) -> dict[int, list[int]]:
        """An EOS completes its slot where it stands, and drops the chosen slots after that slot."""
        left: dict[int, list[int]] = {}
        for slot in sorted(runs):
            end = next((i for i, token in enumerate(runs[slot]) if token in self.eos), None)
            left[slot] = runs[slot] if end is None else runs[slot][: end + 1]
            if end is not None:
                break
        return left

    def full(self, slot: int, run: list[int]) -> bool:
        return len(run) == len(self.slots[slot]) or run[-1] in self.eos

    def commit(self, tokens: dict[int, int], completed: bool) -> None:
        """Write tokens (in the order in which they enter the buffer), note what each saw, close what is done."""
        base, slot_size = len(self.buffer), self.settings.slot_size
        assert slot_size is not None and not set(tokens) & set(self.written)
        slot_of = [position // slot_size for position in tokens]
        for i, (position, token) in enumerate(tokens.items()):
            own = {base + j for j in range(i + 1) if not completed or slot_of[j] == slot_of[i]}
            seen = frozenset(range(base)) | own
            self.buffer.append(Column(token, len(self.prompt) + position, seen))
        self.written.update(tokens)
        self.commits.append(Commit(self.round, tuple(tokens), tuple(tokens.values()), completed))
        self.open -= set(slot_of)
        for position, token in tokens.items():
            if token in self.eos:  # later slots are closed; earlier open ones stay open
                self.open = {slot for slot in self.open if slot < position // slot_size}

    # --- forwards, drafts, thresholds -----------------------------------------------------------------------------

    def forward(self, tokens: list[int], positions: list[int], groups: list[int]) -> Tensor:
        """Probabilities [rows, V] of new rows: each sees the buffer and, of its own group, the rows up to itself."""
        base, total = len(self.buffer), len(self.buffer) + len(tokens)
        visible = torch.zeros(total, total, dtype=torch.bool)
        for i, column in enumerate(self.buffer):
            visible[i, list(column.seen)] = True
        visible[base:, :base] = True
        for i, group in enumerate(groups):
            for j in range(i + 1):
                visible[base + i, base + j] = groups[j] == group
        every_token = [column.token for column in self.buffer] + tokens
        every_position = [column.position for column in self.buffer] + [len(self.prompt) + p for p in positions]
        self.forwards += 1
        return self.probabilities(every_token, every_position, visible)[base:]

    def checks(self, row: list[int], drafts: dict[int, int], out: Tensor, free: set[int]) -> dict[int, float]:
        """Position -> probability of its draft, read from the row before it; infinity where it is not checked."""
        return {
            position: math.inf if position in free else float(out[i - 1][drafts[position]])
            for i, position in enumerate(row)
        }

    def leading(self, row: list[int], probability: dict[int, float]) -> list[int]:
        """The accepted prefix: it ends at the first token with probability <= the token threshold."""
        for i, position in enumerate(row):
            if not self.exceeds(probability[position], self.settings.token_threshold):
                return row[:i]
        return row

    def exceeds(self, probability: float, threshold: float | None) -> bool:
        assert threshold is not None
        if 0 < threshold < 1:  # at the ends nothing is near: all probabilities are > 0, none is > 1
            self.note(abs(probability - threshold))
        return probability > threshold

    def draft(self, row: Tensor, turn: int, position: int) -> int:
        """The token taken from one distribution [V]; greedy ties: the lowest id."""
        allowed = row.clone()
        allowed[list(self.barred)] = 0.0
        if not self.settings.temperature:
            return int((allowed == allowed.max()).nonzero()[0])
        return self.drawn(allowed, self.number(turn, position))

    def drawn(self, allowed: Tensor, u: float) -> int:
        from refusion.sampling import Shaping, draw

        s = self.settings
        assert s.temperature is not None and s.top_k is not None and s.top_p is not None
        return int(draw(allowed, Shaping(s.temperature, s.top_k, s.top_p), u))

    def number(self, turn: int, position: int) -> float:
        if self.uniform is not None:
            return self.uniform(self.round, turn, position)
        from refusion.sampling import uniform

        assert self.settings.seed is not None
        return float(uniform(self.settings.seed, self.round, turn, position))

    def note_draft(self, row: Tensor, turn: int, position: int) -> None:
        """How far a draft was from being another one: greedy, the distance of the best two; else 0 near an edge."""
        allowed = row.clone()
        allowed[list(self.barred)] = 0.0
        if not self.settings.temperature:
            best = allowed.sort(descending=True).values
            self.note(float(best[0] - best[1]))
            return
        u = self.number(turn, position)
        beside = {self.drawn(allowed, max(u - 1e-5, 0.0)), self.drawn(allowed, min(u + 1e-5, 1.0 - 1e-9))}
        if beside != {self.drawn(allowed, u)}:
            self.note(0.0)

    def note(self, distance: float) -> None:
        self.margin = min(self.margin, distance)
