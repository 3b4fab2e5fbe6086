"""The file of `refusion generate --trace`: one JSON object a line, written while the answer is being written.

    {"event": "request", "model", "method", "prompt", "prompt_ids", "settings", "eos_ids"}
    {"event": "drafted", "round", "positions", "tokens", "probabilities", "texts"}      ... every event as it happens
    {"event": "finished", "reason", "tokens", "eos", "texts"}
    {"event": "result", "text", "token_ids", "finish_reason", "stats", "settings"}

`texts` says of each of an event's `tokens` what it adds to the text: a string, or a list of bytes where a token is no whole
characters. A trace without the last two lines was cut short, and can be looked at all the same, half a line at its end left out;
so can one without `texts` and `eos_ids`, which older versions did not write: what ended the text is then the token behind it.

Contract: knows events, and neither models nor methods.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from refusion.config import UserError
from refusion.events import Committed, Drafted, Event, Finished, Selected, Verified, to_dict

TokenText = str | bytes  # bytes: no whole characters
MOST_POSITIONS = 1 << 20  # a trace that names higher ones is damaged, and would take all memory


class TraceWriter:
    """Writes a trace line by line, so that it is there up to the last event whatever happens.

    >>> writer = TraceWriter(file, tokenizer.token_text)         # doctest: +SKIP
    >>> writer.request(model="nano", prompt="...", settings={})  # doctest: +SKIP
    """

    def __init__(self, file: TextIO, text_of: Callable[[int], TokenText]) -> None:
        self.file, self.text_of = file, text_of

    def request(self, **fields: Any) -> None:
        """The first line."""
        self._line({"event": "request", **fields})

    def add(self, event: Event) -> None:
        """The next event, with the texts of its tokens. Raises `UserError` when the file cannot be written."""
        line = to_dict(event)
        if "tokens" in line:
            texts = map(self.text_of, line["tokens"])
            line["texts"] = [list(text) if isinstance(text, bytes) else text for text in texts]
        self._line(line)

    def result(self, result: Mapping[str, Any]) -> None:
        """The last line."""
        self._line({"event": "result", **result})

    def _line(self, line: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(f"--trace {self.file.name}: cannot be written ({error.strerror})") from None


@dataclass(frozen=True)
class Trace:
    """What a trace file says."""

    model: str
    prompt: str
    settings: dict[str, Any]
    events: tuple[Event, ...]
    texts: dict[int, TokenText] = field(default_factory=dict)  # of the tokens in `events`
    eos: frozenset[int] = frozenset()  # ids that end the text; none if they were ignored
    text: str | None = None  # the answer; None if writing was cut short
    stats: dict[str, Any] | None = None  # figures of the whole answer; None likewise

    @property
    def slot_size(self) -> int | None:
        """None: the method has no slots."""
        size = self.settings.get("slot_size")
        return size if _is_count(size) and size > 0 else None

    @property
    def complete(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished)

    def token_text(self, token: int) -> TokenText:
        """A token whose text is not known, or that has none, is shown by its number."""
        return self.texts.get(token) or f"⟨{token}⟩"

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens that follow each other; of one that ends the text, nothing."""
        texts = (self.token_text(token) for token in tokens if token not in self.eos)
        pieces = (text if isinstance(text, bytes) else text.encode(errors="replace") for text in texts)
        return b"".join(pieces).decode(errors="replace")

    def figures(self) -> str | None:
        """The one line that says what the answer cost."""
        if self.stats is None:
            return None
        tokens, forwards = self.stats["tokens"], self.stats["forwards"]
        return f"{tokens} tokens in {forwards} forwards: {tokens / max(1, forwards):.2f} tokens per forward"


def read_trace(path: Path) -> Trace:
    """Raises `UserError` naming the file, and the line that is broken."""
    number, reader = 0, _Reader()
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                number += 1
                if line.strip() and not (reader.request and _is_half(line)):
                    reader.add(_object(line))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a trace of refusion generate --trace (not UTF-8 text)") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except KeyError as error:
        raise UserError(f"{path}: line {number}: there is no {error.args[0]!r}") from None
    except ValueError as error:
        raise UserError(f"{path}: line {number}: {error}") from None
    if reader.request is None:
        raise UserError(f"{path}: not a trace of refusion generate --trace (empty)")
    return reader.trace()


def _is_half(line: str) -> bool:
    """The last line, of a process that was killed while it wrote."""
    return not line.endswith(("\n", "}"))


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits, endless brackets
        raise ValueError("not JSON") from None
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        raise ValueError('not a line of a trace: an object that says under "event" what it is')
    return value


class _Reader:
    """Takes a trace's lines in. Its methods raise ValueError, or KeyError of a field that is missing."""

    def __init__(self) -> None:
        self.request: dict[str, Any] | None = None
        self.result: dict[str, Any] | None = None
        self.events: list[Event] = []
        self.texts: dict[int, TokenText] = {}

    def add(self, line: dict[str, Any]) -> None:
        name = line["event"]
        if self.request is None:
            if name != "request":
                raise ValueError("not a trace of refusion generate --trace, which begins with the request")
            self.request = {**line, "eos_ids": _counts(line["eos_ids"], "eos_ids") if "eos_ids" in line else None}
            for key, kind in (("model", str), ("prompt", str), ("settings", dict)):
                _checked(line[key], kind, key)
        elif self.result is not None:
            raise ValueError(f"{name!r:.40} after the result")
        elif name == "result":
            self.result = {"text": _checked(line["text"], str, "text"), "stats": _stats(line["stats"])}
        elif self.events and isinstance(self.events[-1], Finished):
            raise ValueError(f"{name!r:.40} after the end of the answer")
        elif name in READERS:
            self.events.append(READERS[name](line))
            self._take_texts(line)
        else:
            raise ValueError(f"unknown event {name!r:.40}")

    def _take_texts(self, line: dict[str, Any]) -> None:
        tokens, texts = line.get("tokens", []), line.get("texts", [])
        if "texts" in line and (not isinstance(texts, list) or len(texts) != len(tokens)):
            raise ValueError("texts must be as many as tokens")
        for token, text in zip(tokens, texts, strict=False):
            if token not in self.texts:
                self.texts[token] = text if isinstance(text, str) else bytes(_counts(text, "texts", 256))

    def _behind_the_end(self) -> set[int]:
        """The token that was written where the finished answer ends."""
        last = self.events[-1] if self.events else None
        if not isinstance(last, Finished) or not last.eos:
            return set()
        places = (zip(e.positions, e.tokens, strict=True) for e in self.events if isinstance(e, Committed))
        return {token for pairs in places for position, token in pairs if position == len(last.tokens)}

    def trace(self) -> Trace:
        assert self.request is not None
        result = self.result or {"text": None, "stats": None}
        eos = self._behind_the_end() if self.request["eos_ids"] is None else self.request["eos_ids"]
        return Trace(
            self.request["model"], self.request["prompt"], self.request["settings"], tuple(self.events), self.texts,
            frozenset(eos), result["text"], result["stats"],
        )  # fmt: skip


# --- one line: every reader checks, since the picture is only as good as what it is made of


def _drafted(line: dict[str, Any]) -> Event:
    positions, tokens = _placed(line)
    return Drafted(_round(line), positions, tokens, _numbers(line["probabilities"], "probabilities", len(tokens)))


def _selected(line: dict[str, Any]) -> Event:
    slots = _counts(line["slots"], "slots", MOST_POSITIONS)
    return Selected(_round(line), slots, _numbers(line["scores"], "scores", len(slots)))


def _verified(line: dict[str, Any]) -> Event:
    positions, tokens = _placed(line)
    given = _checked(line["probabilities"], list, "probabilities")
    numbers = iter(_numbers([p for p in given if p is not None], "probabilities"))
    probabilities = tuple(None if p is None else next(numbers) for p in given)
    accepted = line["accepted"]
    if len(probabilities) != len(tokens) or not _is_count(accepted) or accepted > len(tokens):
        raise ValueError("probabilities must be as many as tokens, and accepted not more")
    return Verified(_round(line), positions, tokens, probabilities, accepted)


def _committed(line: dict[str, Any]) -> Event:
    return Committed(_round(line), *_placed(line))


def _finished(line: dict[str, Any]) -> Event:
    tokens = _counts(line["tokens"], "tokens")
    return Finished(_checked(line["reason"], str, "reason"), tokens, _checked(line["eos"], bool, "eos"))


READERS: dict[str, Callable[[dict[str, Any]], Event]] = {
    "drafted": _drafted, "selected": _selected, "verified": _verified, "committed": _committed, "finished": _finished,
}  # fmt: skip


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checked(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        words = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}
        raise ValueError(f"{name} must be {words[kind]}, got {value!r:.40}")
    return value


def _counts(value: Any, name: str, most: int = 1 << 63) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_count(v) and v < most for v in value):
        raise ValueError(f"{name} must be whole numbers from 0 to {most - 1}")
    return tuple(value)


def _round(line: dict[str, Any]) -> int:
    return _counts([line["round"]], "round", MOST_POSITIONS)[0]


def _placed(line: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    positions, tokens = _counts(line["positions"], "positions", MOST_POSITIONS), _counts(line["tokens"], "tokens")
    if len(positions) != len(tokens):
        raise ValueError("tokens must be as many as positions")
    return positions, tokens


def _numbers(value: Any, name: str, count: int | None = None) -> tuple[float, ...]:
    def good(values: list[Any]) -> Iterator[bool]:
        yield from (isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values)

    if not isinstance(value, list) or not all(good(value)) or count not in (None, len(value)):
        raise ValueError(f"{name} must be " + ("numbers" if count is None else f"{count} numbers"))
    return tuple(map(float, value))


def _stats(value: Any) -> dict[str, Any]:
    stats: dict[str, Any] = _checked(value, dict, "stats")
    _counts([stats["tokens"], stats["forwards"]], "stats.tokens and stats.forwards")
    return stats
