"""Likelihood of a given answer: equal to a slow sum over whole forwards, and to what decoding itself says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

import refusion
from refusion.config import UserError

SLOTS, AR = refusion.DecodeConfig, refusion.AutoregressiveConfig


def slow(model: refusion.Model, prompt: Sequence[int], answer: Sequence[int], size: int | None) -> tuple[float, bool]:
    """One whole forward for every token: what stands before it in the text, and a mask where it begins a slot."""
    total, greedy = 0.0, True
    for i, token in enumerate(answer):
        begins = size is not None and i % size == 0
        tokens = [*prompt, *answer[:i], *([model.ids.mask] if begins else [])]
        positions = torch.arange(len(tokens))[None]
        with torch.inference_mode():
            logits = model.transformer.logits(model.transformer(torch.tensor([tokens]), positions))[0, -1].clone()
            total += math.log(logits.softmax(-1)[token])
            logits[model.ids.mask] = float("-inf")
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


@pytest.mark.parametrize("size", [None, 1, 3, 4, 50])
@pytest.mark.parametrize("length", [1, 4, 11])
def test_equal_to_a_slow_sum(any_model: refusion.Model, size: int | None, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    draw = lambda n: torch.randint(4, 80, (n,), generator=generator).tolist()  # noqa: E731
    prompt, answer = draw(5), draw(length)
    config = AR() if size is None else SLOTS(slot_size=size)
    found = any_model.likelihood(prompt, answer, config)
    expected, greedy = slow(any_model, prompt, answer, size)
    assert found.log_probability == pytest.approx(expected, abs=1e-3) and found.greedy == greedy and found.tokens == length


def test_what_is_written_token_by_token_is_greedy(any_model: refusion.Model) -> None:
    written = any_model.generate([5, 6, 7], AR(max_new_tokens=12, ignore_eos=True)).token_ids
    assert any_model.likelihood([5, 6, 7], written, AR()).greedy
    other = [*written[:-1], (written[-1] + 1) % 80]
    assert not any_model.likelihood([5, 6, 7], other, AR()).greedy


def test_probabilities_of_all_answers_of_one_token_add_up_to_one(any_model: refusion.Model) -> None:
    for config in (AR(), SLOTS()):
        total = sum(math.exp(any_model.likelihood([5, 6], [t], config).log_probability) for t in range(89))
        assert total == pytest.approx(1, abs=1e-4)


def test_text(any_model: refusion.Model) -> None:
    ids = any_model.tokenizer.encode("1 2")
    assert any_model.likelihood([5], "1 2") == any_model.likelihood([5], ids)


@pytest.mark.parametrize(("answer", "message"), [
    ("", "answer must not be empty"), ([89_000], "outside the vocabulary"), ([4] * 9000, "context"),
])  # fmt: skip
def test_misuse(any_model: refusion.Model, answer: str | list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        any_model.likelihood([5], answer)
