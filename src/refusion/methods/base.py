"""The common shape of every method: a decoder, and an objective.

A **decoder** is a generator that knows no model, no batch and no server. It yields `Forward` requests and is sent
an `Answer` for each; in between it yields `Event`s and is sent None. Whoever drives it (one prompt, an engine with
many, or a test with scripted answers) owns the cache and counts the calls.

    rows that one forward sees        cache columns, and earlier rows of the same segment of the same forward
                                      (`bidirectional`: all rows of the same segment;
                                      `chained`: and all rows of segments with lower numbers)
    rows that stay in the cache       those named by `keep` of the *next* forward; all others are forgotten
    columns that leave the cache      those from `cut` on, before the forward runs

An **objective** turns one `Example` into a `TrainingRow`, in the data pipeline, seeded, without a model. The trainer
sums its losses over the global batch; it knows no method.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from refusion.events import Event
from refusion.sampling import GREEDY, Shaping

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Forward:
    """One model call for one request. Row i is token `tokens[i]` at absolute position `positions[i]`.

    A row sees the whole cache and the rows 0..i of its own segment, or more (`bidirectional`, `chained`: see above).
    `drafts` are rows whose output draws a token, `uniforms` the numbers in [0, 1) that decide a draw (empty: greedy);
    `checks` are (row, token) pairs whose probability is asked for. `keep` names the rows of the *previous* forward that
    become cache columns before this one runs; `cut` (never together with `keep`) is how many columns stay.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    segments: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    checks: tuple[tuple[int, int], ...] = ()
    uniforms: tuple[float, ...] = ()
    shaping: Shaping = GREEDY
    keep: tuple[int, ...] = ()
    bidirectional: bool = False
    cut: int | None = None
    chained: bool = False


@dataclass(frozen=True)
class Answer:
    """What a `Forward` asked for, in the order in which it was asked. Probabilities: full float32 softmax."""

    tokens: tuple[int, ...] = ()  # one for each draft
    probabilities: tuple[float, ...] = ()  # of these drafted tokens
    checks: tuple[float, ...] = ()  # one for each check


Decoder = Generator[Forward | Event, Answer | None, None]


@dataclass(frozen=True)
class TokenIds:
    """Ids that a method must know by name. `mask` is None for a model that has no mask token."""

    mask: int | None
    eos: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """What is known and what is to be written. All positions are absolute, in the place in the text.

    A question has `context` = prompt at 0..P-1 and its answer (end-of-sequence included) at P. An infilling row has
    the text before *and after* a gap as context; `room` is then the number of positions in the gap, and the answer
    may be shorter.
    """

    context: NDArray[np.int64]
    context_positions: NDArray[np.int64]
    answer: NDArray[np.int64]
    start: int  # position of the answer's first token
    room: int | None = None  # None: no end in sight


@dataclass(frozen=True)
class TrainingRow:
    """One row as the model sees it: causal attention over the order in which tokens stand, any positions.

    All arrays have one entry per token. `targets` is the token asked for at this row, or -1; `losses` the index of
    the loss (in `Objective.losses`) that it belongs to; `weights` multiplies its cross-entropy before the loss is
    normalised.

    A row may hold several states of decoding side by side, each in a segment of its own: a token sees the earlier
    tokens of its segment (`bidirectional`: all tokens of its segment), and of the others those among the row's first
    `prefixes`. An ordinary row is one segment, 0.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    losses: NDArray[np.int64]
    weights: NDArray[np.float32]
    segments: NDArray[np.int64]
    prefixes: NDArray[np.int64]
    bidirectional: bool = False


@dataclass(frozen=True)
class Loss:
    """A part of the objective: `scale` times the weighted sum of cross-entropies, divided by how many targets
    ("targets") or rows ("rows") the *global* batch holds, so that accumulation and data parallelism change nothing.
    Never NaN: nothing to count means zero."""

    name: str
    scale: float = 1.0
    per: str = "targets"


class Objective(Protocol):
    """How a method corrupts an example and what it asks of it."""

    @property
    def losses(self) -> tuple[Loss, ...]: ...

    def row(self, example: Example, rng: np.random.Generator) -> TrainingRow: ...
