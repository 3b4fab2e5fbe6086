"""What a decoder reports while it works. Everything a person sees is a fold over these.

Contract: all positions are relative to the response (0 = its first token); `round` counts from 0.
Events are plain data: no tensors, no model, no text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Drafted:
    """Tokens guessed in one forward, not yet trusted: by a select, or by a turn of complete."""

    round: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Selected:
    """The slots chosen to be written in this round, in ascending order."""

    round: int
    slots: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Verified:
    """Probabilities of drafted tokens given what stands before them; the first `accepted` of the row hold. None: the
    token was not checked, since its selection (in complete: its being the first re-drafted one) accepted it."""

    round: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    probabilities: tuple[float | None, ...]
    accepted: int


@dataclass(frozen=True)
class Committed:
    """Tokens that are final; their keys and values are in the cache."""

    round: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """The response is whole: `tokens` in position order, without end-of-sequence. reason: "stop" | "length"."""

    reason: str
    tokens: tuple[int, ...]
    eos: bool


Event = Drafted | Selected | Verified | Committed | Finished


def to_dict(event: Event) -> dict[str, Any]:
    """One JSON object: the event's fields and its lower-case class name under "event"."""
    return {"event": type(event).__name__.lower(), **asdict(event)}
