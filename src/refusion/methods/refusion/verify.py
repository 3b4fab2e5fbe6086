"""Verify: how much of the drafted tokens is accepted. Pure functions on plain numbers (docs/algorithm.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


def accepted_run(probabilities: Sequence[float | None], threshold: float) -> int:
    """Length of the accepted prefix: it ends at the first token with probability <= `token_threshold`.

    None stands for a token that is not checked: the first of each slot was accepted by its selection.

    >>> accepted_run([None, 0.9, 0.3, 0.8], 0.4)
    2
    >>> accepted_run([None, 0.9, None, 0.4], 0.4)
    3
    """
    for i, probability in enumerate(probabilities):
        if probability is not None and probability <= threshold:
            return i
    return len(probabilities)


def cut_at_end(tokens: Sequence[int], eos: Collection[int]) -> int | None:
    """How many tokens stand up to the first end-of-sequence, itself included; None if there is none.

    >>> cut_at_end([5, 2, 7], {2})
    2
    """
    return next((i + 1 for i, token in enumerate(tokens) if token in eos), None)


@dataclass(frozen=True)
class Verdict:
    """What a joint verify decides about the row of all chosen drafts. Nothing committed means: complete."""

    accepted: int  # length of the accepted prefix of the row
    committed: int  # tokens to commit, from the start of the row: leading whole slots, or up to end-of-sequence
    ended: bool  # the commit ends with end-of-sequence


def judge(
    tokens: Sequence[int],
    probabilities: Sequence[float | None],
    lengths: Sequence[int],
    threshold: float,
    eos: Collection[int],
) -> Verdict:
    """Joint verdict on chosen slots that stand one after another in a row; `lengths`: tokens of each.

    >>> judge([7, 8, 9, 7], [None, 0.9, None, 0.1], [2, 2], 0.4, {1})      # the first slot is whole, the second not
    Verdict(accepted=3, committed=2, ended=False)
    >>> judge([7, 1, 9, 7], [None, 0.9, None, 0.9], [2, 2], 0.4, {1})      # end-of-sequence in the first slot
    Verdict(accepted=4, committed=2, ended=True)
    """
    accepted = accepted_run(probabilities, threshold)
    end = cut_at_end(tokens[:accepted], eos)
    if end is not None:
        return Verdict(accepted, end, True)
    whole = 0
    for length in lengths:
        if whole + length > accepted:
            break
        whole += length
    return Verdict(accepted, whole, False)
