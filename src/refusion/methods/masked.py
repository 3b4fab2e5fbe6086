"""Masked diffusion: LLaDA (arXiv 2502.09992), Dream (arXiv 2508.15487), and Fast-dLLM's faster decoding of both (arXiv
2505.22618). Attention is bidirectional: every token sees the prompt, what is written, and all masks.

Objective: t ~ U(0, 1]; each token of the answer, padded with end-of-sequence, is masked with probability t and asked for;
its cross-entropy is divided by t and by the answer's length. LLaDA asks for a token at its own mask, Dream where the token
before it stands, as the autoregressive checkpoint that it comes from did ("shifted"):

    text        p  q  a  b  c  E  E       prompt `p q`, answer `a b c` and end-of-sequence up to 5 tokens
    row         p  q  M  b  M  E  M
    LLaDA       -  -  a  -  c  -  E
    Dream       -  a  -  c  -  E  -

Decoding: the response begins as masks only. Each forward drafts a token at every mask of the block and writes the surest
ones; the others are masks again. A block of 4 tokens in 2 steps, and what each kind of cache computes in the second one:

    first       p q M M M M | M M         rows of the whole text; its keys and values may be kept
    second      p q M b M d | M M         none: all rows again        prefix: M b M d M M        dual: M b M d
                                          (shifted: and the row before the block, where its first token is asked for)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from refusion.config import DreamConfig, LladaConfig, MaskedConfig, UserError
from refusion.events import Committed, Drafted, Event, Finished
from refusion.methods.base import Answer, Decoder, Example, Forward, Loss, TokenIds, TrainingRow
from refusion.methods.refusion.select import choose
from refusion.sampling import Shaping, uniform

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
Move = Generator[Forward | Event, Answer | None, T]  # a part of the decoder that returns a T

LEAST_T = 1e-3  # Dream's schedule ends here, not at 0
SCORES = {"maskgit_plus": "probability", "topk_margin": "margin", "entropy": "entropy"}  # of Dream's orders


# --- the objective


@dataclass(frozen=True)
class MaskedObjective:
    """Cross-entropy at masked tokens / (t * length), mean over rows; an infilling row's answer fills its gap."""

    ids: TokenIds
    answer_length: int = 128  # answers are padded with end-of-sequence to this many tokens; longer ones stay
    shifted: bool = False
    context_p: float = 0.0  # Dream's weights from the nearness of known tokens, Geo(p), instead of 1 / t; 0 is off

    def __post_init__(self) -> None:
        if self.ids.mask is None or not self.ids.eos:
            raise UserError("the masked objectives need a model with a mask token and an end-of-sequence token")
        if self.answer_length < 1:
            raise UserError(f"answer_length must be at least 1, got {self.answer_length}")
        if not 0 <= self.context_p <= 1:
            raise UserError(f"context_p must be between 0 and 1, got {self.context_p}")

    @property
    def losses(self) -> tuple[Loss, ...]:
        return (Loss("mdm", per="rows"),)

    def row(self, example: Example, rng: np.random.Generator) -> TrainingRow:
        """Corrupt one example: pad the answer, draw t, mask tokens, set targets and weights."""
        import numpy as np  # wanted in training only

        from refusion.methods.rows import context_weights, masked_row, padded

        assert self.ids.mask is not None
        end = int(example.answer[-1])
        end = end if end in self.ids.eos else self.ids.eos[0]
        answer = padded(example.answer, self.answer_length if example.room is None else example.room, end)
        t = 1.0 - rng.random()
        masked = rng.random(len(answer)) < t
        weights = np.full(len(answer), 1 / t)
        if self.context_p:
            places = example.start + np.arange(len(answer))
            known = np.concatenate([example.context_positions, places[~masked]])
            weights = context_weights(known, places, self.context_p)
        return masked_row(example, answer, masked, self.ids.mask, weights / len(answer), self.shifted)


# --- how many tokens a forward writes, and which: pure functions on plain numbers


def blocks(length: int, size: int, steps: int) -> Iterator[tuple[range, int]]:
    """The blocks of a response, left to right, and each one's share of the steps: by its length, at least one.

    >>> list(blocks(10, 4, 5))
    [(range(0, 4), 2), (range(4, 8), 2), (range(8, 10), 1)]
    """
    for start in range(0, length, size):
        stop = min(start + size, length)
        yield range(start, stop), max(1, stop * steps // length - start * steps // length)


def even(step: int, steps: int, length: int) -> int:
    """LLaDA: tokens that this step of a block writes; spread evenly, the first steps take what is left over.

    >>> [even(step, 3, 8) for step in range(3)]
    [3, 3, 2]
    """
    return length // steps + (step < length % steps)


def share(step: int, steps: int) -> float:
    """Dream: which part of the masked tokens this step writes: (t - s) / t, on its way from t to s; the last one all.

    >>> [round(share(step, 4), 2) for step in range(4)]
    [0.25, 0.33, 0.5, 1.0]
    """
    if step == steps - 1:
        return 1.0
    width = (1 - LEAST_T) / steps
    return width / (1 - step * width)


def surest(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` highest scores, ascending; of equals the earlier ones.

    >>> surest([0.3, 0.9, 0.3, 0.5], 3)
    [0, 1, 3]
    """
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:count])


def safe_count(probabilities: Sequence[float], factor: float) -> int:
    """Fast-dLLM: the largest n with (n + 1) * (1 - n-th highest probability) < factor; at least 1.

    >>> safe_count([0.2, 0.99, 0.8], 0.7), safe_count([0.2, 0.99, 0.8], 0.5), safe_count([0.2], 0.5)
    (2, 1, 1)
    """
    ranked = enumerate(sorted(probabilities, reverse=True), 1)
    return max((n for n, probability in ranked if (n + 1) * (1 - probability) < factor), default=1)


# --- the decoders


def decode_llada(prompt: Sequence[int], settings: LladaConfig, ids: TokenIds) -> Decoder:
    """Write a response to `prompt` (token ids, at least one). settings: resolved, nothing unset."""
    score = "random" if settings.remasking == "random" else "probability"
    return _write(_Llada(prompt, settings, ids, score, shift=0))


def decode_dream(prompt: Sequence[int], settings: DreamConfig, ids: TokenIds) -> Decoder:
    """Write a response to `prompt` (token ids, at least one). settings: resolved, nothing unset."""
    assert settings.order is not None
    return _write(_Dream(prompt, settings, ids, SCORES.get(settings.order, "random"), shift=1))


def _write(state: _Decoding) -> Decoder:
    """All blocks; it ends early when everything before an end-of-sequence is written, since nothing can change it.

    A step that would write nothing changes nothing, and costs no forward.
    """
    for block, steps in state.blocks():
        state.begin(block)
        step = 0
        while state.open and not state.ended:
            count = state.quota(step, steps)
            if count:
                yield from state.turn(count)
            step, state.step = step + 1, state.step + 1
        if state.ended:
            break
    yield state.finished()


class _Decoding:
    """What is known between two forwards. Positions are relative to the response."""

    def __init__(self, prompt: Sequence[int], settings: MaskedConfig, ids: TokenIds, score: str, shift: int) -> None:
        s = settings
        assert len(prompt) > 0 and ids.mask is not None and s.max_new_tokens is not None and s.seed is not None
        assert s.temperature is not None and s.top_k is not None and s.top_p is not None
        assert s.block_size is not None and s.steps is not None and s.cache is not None
        assert s.confidence_threshold is not None and s.factor is not None
        self.threshold, self.factor, self.cache, self.seed = s.confidence_threshold, s.factor, s.cache, s.seed
        self.length = s.max_new_tokens
        self.block_size, self.steps = s.block_size or self.length, s.steps or self.length
        self.shaping = Shaping(s.temperature, s.top_k, s.top_p)
        self.score, self.shift = score, shift
        self.eos = frozenset() if s.ignore_eos else frozenset(ids.eos)
        self.prompt_len, self.text = len(prompt), [*prompt, *[ids.mask] * self.length]
        self.open: list[int] = []  # masked positions of the block, ascending
        self.block = range(0)
        self.step = 0  # steps, also those without a forward: chance depends on them
        self.round = 0  # forwards
        self._turn = 0  # forwards in this block

    def blocks(self) -> Iterator[tuple[range, int]]:
        return blocks(self.length, self.block_size, self.steps)

    def begin(self, block: range) -> None:
        self.block, self.open, self._turn = block, list(block), 0

    def quota(self, step: int, steps: int) -> int:
        """How many tokens this step of the block writes."""
        raise NotImplementedError

    def chance(self) -> list[float]:
        """A random number for each open position, of this step."""
        return [uniform(self.seed, self.step, 1, position) for position in self.open]

    @property
    def ended(self) -> bool:
        """Whether an end-of-sequence is written, and everything before it."""
        settled = self.open[0] if self.open else self.block.stop
        return any(token in self.eos for token in self.text[self.prompt_len : self.prompt_len + settled])

    def turn(self, count: int) -> Move[None]:
        """One forward: draft every open position, write the surest."""
        answer = yield self.request()
        assert answer is not None
        yield Drafted(self.round, tuple(self.open), answer.tokens, answer.probabilities)
        chosen = self.chosen(answer, count)
        positions, tokens = tuple(self.open[i] for i in chosen), tuple(answer.tokens[i] for i in chosen)
        for position, token in zip(positions, tokens, strict=True):
            self.text[self.prompt_len + position] = token
        self.open = [position for position in self.open if position not in positions]
        yield Committed(self.round, positions, tokens)
        self.round, self._turn = self.round + 1, self._turn + 1

    def chosen(self, answer: Answer, count: int) -> list[int]:
        """Which of the drafts are written: their indices, ascending."""
        if self.threshold:
            return choose(answer.probabilities, self.threshold)
        if self.factor:
            return surest(answer.probabilities, safe_count(answer.probabilities, self.factor))
        if self.score == "random":
            return surest([-chance for chance in self.chance()], count)
        return surest(answer.scores or answer.probabilities, count)

    def request(self) -> Forward:
        """The rows of this turn: of the whole text, or of what the cache does not hold."""
        rows, keep, cut = range(len(self.text)), (), None
        if self.cache == "none" or self._turn == 0:
            cut = 0
        else:
            begin = self.prompt_len + self.block.start - self.shift
            end = self.prompt_len + self.block.stop if self.cache == "dual" else len(self.text)
            if self._turn == 1:  # the block's first forward has a row for each position
                keep = (*rows[:begin], *rows[end:])
            rows = range(begin, end)
        drafts = tuple(self.prompt_len + position - self.shift - rows.start for position in self.open)
        uniforms = tuple(uniform(self.seed, self.step, 0, position) for position in self.open)
        return Forward(
            tuple(self.text[rows.start : rows.stop]), tuple(rows), (0,) * len(rows), drafts,
            uniforms=uniforms if self.shaping.temperature > 0 else (), shaping=self.shaping, keep=keep, cut=cut,
            bidirectional=True, score=self.score if self.score in ("margin", "entropy") else "probability",
        )  # fmt: skip

    def finished(self) -> Finished:
        """The tokens up to end-of-sequence; what stands after it is dropped."""
        response = self.text[self.prompt_len :]
        if not self.ended:
            return Finished("length", tuple(response), False)
        end = next(i for i, token in enumerate(response) if token in self.eos)
        return Finished("stop", tuple(response[:end]), True)


class _Llada(_Decoding):
    def quota(self, step: int, steps: int) -> int:
        return 1 if self.threshold or self.factor else even(step, steps, len(self.block))


class _Dream(_Decoding):
    def quota(self, step: int, steps: int) -> int:
        if self.threshold or self.factor:
            return 1
        if self.score == "random":
            return sum(chance < share(step, steps) for chance in self.chance())
        return int(len(self.open) * share(step, steps))
