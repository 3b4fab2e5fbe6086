"""BD3-LM, block diffusion: blocks from left to right, masked diffusion inside a block (Arriola et al. 2025, arXiv
2503.09573). The objective and the decoder; neither knows a model.

Attention is block-causal: a token sees its own block both ways, and all of every block before it. **The prompt is the
first block**, so it sees itself both ways too, in training and in decoding. The output at a masked position is the
token of that position (no shift).

A training row holds every block twice: clean, to be seen by later blocks, and noised, to be asked. Prompt `p q` at 0, 1;
answer `a b c d e` at 2..6, blocks of 2, the last one filled with end-of-sequence `e`:

    segment    0     1     2   |  3     4     5
    buffer     p q   a b   c d |  a M   M M   M e        nobody would see the last block's clean copy: there is none
    position   0 1   2 3   4 5 |  2 3   4 5   6 7
    sees       p q   ..b   ..d |  p q   ..b   ..d        and its own segment, both ways
    target     - -   - -   - - |  - b   c d   e -

Decoding the same with one token a step. Rows in brackets are clean: their keys and values go to the cache by this very
forward, in which the masks see them already ("fusing"), so that a block costs no forward besides its steps:

    forward    [p q] M M     ->  b at 3 is the surest
               M b           ->  a at 2
               [a b] M M     ->  c at 4    ...

That is exact: a clean row sees the cache and its own segment, never the masks, as if it had a forward to itself
(tests/test_block.py compares both with a version that has no cache).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from refusion.config import BlockConfig, UserError
from refusion.events import Committed, Drafted, Event, Finished
from refusion.methods.base import Answer, Decoder, Example, Forward, Loss, TokenIds, TrainingRow
from refusion.sampling import Shaping, uniform

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
Move = Generator[Forward | Event, Answer | None, T]  # a part of the decoder that returns a T


# --- training


@dataclass(frozen=True)
class BlockObjective:
    """Cross-entropy at masked tokens / (t * length of the answer), mean over rows; each block is masked at a rate t of
    its own, drawn from U(low, high] with `noise_range` = (low, high).

    Every token of a block is masked with probability t, so each counts 1 on average. A range within (0, 1) is the
    paper's clipped schedule: gradients that vary less, and rates that are never learnt.
    """

    ids: TokenIds
    block_sizes: tuple[int, ...] = (8,)  # one is drawn for each row
    noise_range: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.ids.mask is None:
            raise UserError("the bd3lm objective needs a model with a mask token")
        if not self.block_sizes or min(self.block_sizes) < 1:
            raise UserError(f"block_sizes must be positive, and at least one, got {list(self.block_sizes)}")
        low, high = self.noise_range if len(self.noise_range) == 2 else (0.0, 0.0)
        if not 0 <= low <= high <= 1 or high == 0:
            raise UserError(f"noise_range must be [low, high] with 0 <= low <= high <= 1, got {list(self.noise_range)}")

    @property
    def losses(self) -> tuple[Loss, ...]:
        return (Loss("mdm", per="rows"),)

    def row(self, example: Example, rng: np.random.Generator) -> TrainingRow:
        """The prompt, the clean blocks but for the last one, and every block noised."""
        import numpy as np  # wanted in training only

        from refusion.methods.rows import RowBuilder

        assert self.ids.mask is not None
        size = int(rng.choice(self.block_sizes))
        answer = self._filled(example, size)
        starts = range(0, len(answer), size)
        rates = self._rates(len(starts), rng).repeat(size)[: len(answer)]  # t of every token
        masked = rng.random(len(answer)) < rates
        noised, targets = np.where(masked, self.ids.mask, answer), np.where(masked, answer, -1)
        none = np.full(size, -1)

        builder = RowBuilder(example)
        seen = []  # how much of the row the blocks see, besides themselves
        for start in starts:
            seen.append(len(builder))
            if start + size < len(answer):
                clean = answer[start : start + size]
                builder.add(clean, example.start + start, none, 0, segment=builder.new_segment(), prefix=seen[-1])
        for start, prefix in zip(starts, seen, strict=True):
            own = slice(start, start + size)
            segment = builder.new_segment()
            builder.add(noised[own], example.start + start, targets[own], 0, segment=segment, prefix=prefix)
        row = builder.build({}, bidirectional=True)
        row.weights[-len(answer) :] = 1.0 / (rates * len(answer))
        return row

    def _filled(self, example: Example, size: int) -> NDArray[np.int64]:
        """The answer, and end-of-sequence up to the end of its last block, or of its gap if that is nearer."""
        import numpy as np

        answer = example.answer
        if int(answer[-1]) not in self.ids.eos:
            return answer
        length = -(-len(answer) // size) * size
        if example.room is not None:
            length = max(len(answer), min(length, example.room))
        return np.append(answer, np.full(length - len(answer), answer[-1]))

    def _rates(self, blocks: int, rng: np.random.Generator) -> NDArray[np.float64]:
        low, high = self.noise_range
        return high - (high - low) * rng.random(blocks)


# --- decoding


def decode(prompt: Sequence[int], settings: BlockConfig, ids: TokenIds, *, fuse: bool = True) -> Decoder:
    """Write a response to `prompt` (token ids, at least one) block by block.

    settings: resolved, nothing unset. fuse: store the clean block by the next block's first forward, not by one of its
    own; it changes the number of forwards, never a token.
    """
    state = _Decoding(prompt, settings, ids, fuse)
    for start in range(0, state.length, state.size):
        if state.end is None:
            yield from state.denoise(range(start, min(start + state.size, state.length)))
    yield state.finished()


def surest(probabilities: Sequence[float], share: int, threshold: float) -> list[int]:
    """The `share` likeliest and all over the threshold, in ascending order; of equals the earlier one.

    >>> surest((0.5, 0.95, 0.7, 0.92), 1, 0.9), surest((0.5, 0.95, 0.7, 0.92), 3, 0.9)
    ([1, 3], [1, 2, 3])
    """
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    return sorted(i for rank, i in enumerate(order) if rank < share or probabilities[i] > threshold)


@dataclass
class _Decoding:
    """What is known between two forwards. Positions are relative to the response, the prompt's are negative."""

    prompt: Sequence[int]
    settings: BlockConfig
    ids: TokenIds
    fuse: bool
    round: int = 0
    end: int | None = None  # position of the first end-of-sequence
    _written: dict[int, int] = field(default_factory=dict)  # position -> token
    _keep: tuple[int, ...] = ()  # rows of the last forward that the cache is to hold

    def __post_init__(self) -> None:
        s = self.settings
        assert len(self.prompt) > 0 and self.ids.mask is not None
        assert s.max_new_tokens and s.block_size and s.block_steps is not None and s.seed is not None
        assert s.confidence_threshold is not None
        assert s.temperature is not None and s.top_k is not None and s.top_p is not None
        self.length, self.size, self.seed, self.mask = s.max_new_tokens, s.block_size, s.seed, self.ids.mask
        self.steps, self.threshold = s.block_steps, s.confidence_threshold
        self.shaping = Shaping(s.temperature, s.top_k, s.top_p)
        self.eos = frozenset() if s.ignore_eos else frozenset(self.ids.eos)
        self._clean = range(-len(self.prompt), 0)  # final positions whose keys and values no cache holds yet

    def denoise(self, block: range) -> Move[None]:
        """Fill one block: each step drafts what is open and commits the surest drafts."""
        open_, steps = list(block), self.steps or len(block)
        while open_:
            answer = yield from self._draft(block, open_)
            yield Drafted(self.round, tuple(open_), answer.tokens, answer.probabilities)
            chosen = surest(answer.probabilities, -(-len(open_) // steps), self.threshold)
            yield self._commit([open_[i] for i in chosen], [answer.tokens[i] for i in chosen])
            open_ = [p for p in open_ if p not in self._written and (self.end is None or p < self.end)]
            self.round, steps = self.round + 1, max(1, steps - 1)
        self._clean = block

    def _draft(self, block: range, open_: Sequence[int]) -> Move[Answer]:
        """One forward of the block as it stands, its drafts asked at the open positions."""
        clean, self._clean = self._clean, range(0)
        if clean and not self.fuse:
            yield from self._forward(clean, range(0), ())
            clean = range(0)
        return (yield from self._forward(clean, block, open_))

    def _forward(self, clean: range, block: range, open_: Sequence[int]) -> Move[Answer]:
        """Rows of `clean`, which see the cache and themselves, and of `block`, which see these too."""
        places = [*clean, *block]
        answer = yield Forward(
            tuple(self._token(place) for place in places), tuple(len(self.prompt) + place for place in places),
            (0,) * len(clean) + (1,) * len(block), tuple(len(clean) + place - block.start for place in open_),
            uniforms=self._uniforms(open_), shaping=self.shaping, keep=self._keep, bidirectional=True, chained=True,
        )  # fmt: skip
        assert answer is not None
        self._keep = tuple(range(len(clean)))
        return answer

    def _token(self, place: int) -> int:
        return self.prompt[place] if place < 0 else self._written.get(place, self.mask)

    def _uniforms(self, places: Sequence[int]) -> tuple[float, ...]:
        if self.shaping.temperature == 0:
            return ()
        return tuple(uniform(self.seed, self.round, 0, place) for place in places)

    def _commit(self, places: Sequence[int], tokens: Sequence[int]) -> Committed:
        """Make drafts final; what stands after an end-of-sequence among them stays masked, and will never be asked."""
        count = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
        if count is not None:
            self.end = places[count - 1]
        places, tokens = tuple(places[:count]), tuple(tokens[:count])
        self._written |= zip(places, tokens, strict=True)
        return Committed(self.round, places, tokens)

    def finished(self) -> Finished:
        """The tokens in position order up to end-of-sequence; what was committed after it is dropped."""
        length = self.length if self.end is None else self.end
        tokens = tuple(self._written[place] for place in range(length))
        return Finished("length" if self.end is None else "stop", tokens, self.end is not None)
