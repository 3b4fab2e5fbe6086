"""Models without weights, and a driver for decoders that runs on them.

A scripted model answers for a *column*: a token at a position together with the columns that it saw, each with what it
saw in turn. So an answer depends on exactly what a row may see, and a wrong `keep`, segment or position changes it.

Contract: the driver follows `refusion.methods.base` to the letter and asserts what a decoder promises there. It counts
forwards and rows, bars the mask id (and what else it is told) from drafting, and breaks ties by the lowest token id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from refusion.events import Event
from refusion.methods.base import Answer, Decoder, Forward

WORD = (1 << 64) - 1


def mixed(value: int) -> int:
    """A 64-bit number that looks random (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def unit(value: int) -> float:
    """A number in [0, 1) from a 64-bit one."""
    return (mixed(value) >> 11) / (1 << 53)


class Model(Protocol):
    """What the driver and `recomputed` need: a column for a row that sees columns, and what that column predicts."""

    def column(self, token: int, position: int, seen: Sequence[Any]) -> Any: ...

    def distribution(self, column: Any) -> Tensor: ...  # float32 [V]


@dataclass(frozen=True, slots=True)
class Hashed:
    token: int
    position: int
    key: int  # of the token, its position, and the set of columns that it saw
    word: int  # `key` mixed, ready to be added up


@dataclass
class HashModel:
    """Pseudo-random distributions with a preferred text, so that drafts are accepted often and not always.

    A mask predicts its own position, any other token the next one. `agreement` scales how strongly the preferred
    token of that position stands out (drawn anew for each column), `noise` how uneven the others are; the preferred
    token is EOS with the rate `eos_rate`; at rate 0 an EOS is all but impossible.
    """

    seed: int
    vocabulary: int = 12
    mask: int = 0
    eos: tuple[int, ...] = (1,)
    agreement: float = 8.0
    noise: float = 2.0
    eos_rate: float = 0.1
    known: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def column(self, token: int, position: int, seen: Sequence[Hashed]) -> Hashed:
        # A sum: attention does not care in which order it sees, only positions do.
        past = sum(other.word for other in seen) & WORD
        key = mixed(mixed(mixed(self.seed ^ past) + token) + position)
        return Hashed(token, position, key, mixed(key ^ 0x5555))

    def preferred(self, position: int) -> int:
        draw = mixed(self.seed * 1_000_003 + position)
        if self.eos and unit(draw) < self.eos_rate:
            return self.eos[draw % len(self.eos)]
        ordinary = [t for t in range(self.vocabulary) if t != self.mask and t not in self.eos]
        return ordinary[mixed(draw) % len(ordinary)]

    def distribution(self, column: Hashed) -> Tensor:
        if column.key not in self.known:
            self.known[column.key] = self.compute(column)
        return self.known[column.key]

    def compute(self, column: Hashed) -> Tensor:
        logits = [self.noise * unit(column.key + 7 * token + 1) for token in range(self.vocabulary)]
        if self.eos_rate == 0:
            for token in self.eos:
                logits[token] -= 30.0
        target = column.position + (column.token != self.mask)
        logits[self.preferred(target)] += self.agreement * unit(column.key ^ 0xABCDEF)
        weights = [math.exp(logit) for logit in logits]
        total = sum(weights)
        return torch.tensor([weight / total for weight in weights], dtype=torch.float32)


@dataclass(frozen=True)
class Told:
    token: int
    position: int
    seen: frozenset[tuple[int, int]]  # (token, position) of all that was seen, itself included


@dataclass
class ToldModel:
    """Says what it is told: `rule(column)` gives the probabilities of some tokens; the others share the rest."""

    rule: Callable[[Told], Mapping[int, float]]
    vocabulary: int = 12

    def column(self, token: int, position: int, seen: Sequence[Told]) -> Told:
        return Told(token, position, frozenset({(token, position)} | {(c.token, c.position) for c in seen}))

    def distribution(self, column: Told) -> Tensor:
        given = dict(self.rule(column))
        rest = (1.0 - sum(given.values())) / (self.vocabulary - len(given))
        return torch.tensor([given.get(t, rest) for t in range(self.vocabulary)], dtype=torch.float32)


def recomputed(model: Model) -> Callable[[Sequence[int], Sequence[int], Tensor], Tensor]:
    """The model as the oracle wants it: everything from tokens, positions and a matrix of who sees whom."""

    def probabilities(tokens: Sequence[int], positions: Sequence[int], visible: Tensor) -> Tensor:
        columns: list[Any] = []
        for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            seen = visible[i].tolist()
            assert seen[i] and not any(seen[i + 1 :])
            columns.append(model.column(token, position, [c for j, c in enumerate(columns) if seen[j]]))
        return torch.stack([model.distribution(column) for column in columns])

    return probabilities


def both_ways(
    model: Model, tokens: Sequence[int], positions: Sequence[int], segments: Sequence[int], cache: Sequence[Any]
) -> list[Any]:
    """Columns of rows that see the cache and all rows of their segment: of these, as in one layer, token and position."""
    plain = [model.column(token, position, ()) for token, position in zip(tokens, positions, strict=True)]
    return [
        model.column(tokens[i], positions[i], [*cache, *(c for j, c in enumerate(plain) if j != i and segments[j] == segment)])
        for i, segment in enumerate(segments)
    ]  # fmt: skip


@dataclass
class Driven:
    """What came out of a decoder, and every forward that it asked for."""

    events: list[Event] = field(default_factory=list)
    requests: list[Forward] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def forwards(self) -> int:
        return len(self.requests)

    @property
    def rows(self) -> int:
        return sum(len(request.tokens) for request in self.requests)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def drive(decoder: Decoder, respond: Callable[[Forward], Answer]) -> Driven:
    """Run a decoder to its end; `respond` owns the cache (`Script` here, a real model in other tests)."""
    driven, answer = Driven(), None
    while True:
        try:
            item = decoder.send(answer)
        except StopIteration:
            return driven
        answer = None
        if isinstance(item, Forward):
            well_formed(item, driven.requests[-1] if driven.requests else None)
            answer = respond(item)
            driven.requests.append(item)
            driven.answers.append(answer)
        else:
            driven.events.append(item)


def well_formed(request: Forward, before: Forward | None) -> None:
    """What a request promises, whoever runs it."""
    rows = len(request.tokens)
    assert rows and len(request.positions) == len(request.segments) == rows
    assert all(0 <= row < rows for row in request.drafts) and all(0 <= row < rows for row, _ in request.checks)
    assert len(set(request.drafts)) == len(request.drafts)
    assert len(request.uniforms) in (0, len(request.drafts))
    assert bool(request.uniforms) == (request.shaping.temperature > 0 and bool(request.drafts))
    assert all(0 <= u < 1 for u in request.uniforms)
    assert len(set(request.keep)) == len(request.keep)
    assert all(0 <= row < (len(before.tokens) if before else 0) for row in request.keep)
    assert request.cut is None or (request.cut >= 0 and not request.keep)


def take(allowed: Tensor, request: Forward, index: int) -> int:
    """The draft of one distribution [V] whose barred ids are 0."""
    if not request.uniforms:
        return int((allowed == allowed.max()).nonzero()[0])
    from refusion.sampling import draw

    return int(draw(allowed, request.shaping, request.uniforms[index]))


def answered(request: Forward, rows: Callable[[int], Tensor], barred: Collection[int]) -> Answer:
    """The answer to a request; rows(i) is the distribution [V] after row i."""
    tokens, probabilities = [], []
    for index, row in enumerate(request.drafts):
        allowed = rows(row).clone()
        allowed[list(barred)] = 0.0
        tokens.append(take(allowed, request, index))
        probabilities.append(float(rows(row)[tokens[-1]]))
    checks = tuple(float(rows(row)[token]) for row, token in request.checks)
    scores = () if request.score == "probability" else tuple(surety(rows(row), request.score) for row in request.drafts)
    return Answer(tuple(tokens), tuple(probabilities), checks, scores)


def surety(distribution: Tensor, score: str) -> float:
    """How sure a distribution is, by hand."""
    if score == "margin":
        first, second = sorted(distribution.tolist(), reverse=True)[:2]
        return float(first - second)
    assert score == "entropy"
    return sum(p * math.log(p) for p in distribution.tolist() if p > 0)


@dataclass
class Script:
    """Answers requests from a scripted model and keeps the visible context like a cache."""

    model: Model
    barred: Collection[int] = (0,)
    cache: list[Any] = field(default_factory=list)
    last: list[Any] = field(default_factory=list)

    def __call__(self, request: Forward) -> Answer:
        self.cache += [self.last[row] for row in request.keep]
        if request.cut is not None:
            assert request.cut <= len(self.cache)
            del self.cache[request.cut :]
        if request.bidirectional:
            self.last = both_ways(self.model, request.tokens, request.positions, request.segments, self.cache)
            return answered(request, lambda row: self.model.distribution(self.last[row]), self.barred)
        columns: list[Any] = []
        for token, position, segment in zip(request.tokens, request.positions, request.segments, strict=True):
            own = [c for c, s in zip(columns, request.segments, strict=False) if s == segment]
            columns.append(self.model.column(token, position, self.cache + own))
        self.last = columns
        return answered(request, lambda row: self.model.distribution(columns[row]), self.barred)
