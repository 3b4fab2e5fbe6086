"""Recorded decodes of two tiny Qwen3 folders: first the oracle, which they prove right, then the package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import oracle
import refusion
from refusion.config import DecodeConfig
from refusion.models.transformer import ModelConfig, Transformer

OWN = Path(__file__).parent / "cases" / "decode"
CASES = OWN if OWN.is_dir() else Path(__file__).parents[2] / "shared" / "cases" / "decode"
MASK, EOS = 4, 3
FOLDERS = [("trained", 100), ("random", 57)]

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no recorded cases in {CASES}")


@cache
def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / f"{name}.jsonl").read_text("utf-8").splitlines()]


@cache
def by_hand(name: str) -> Transformer:
    """The folder's model without the package's own reader: bfloat16 weights, computed in float32."""
    shape = json.loads((CASES / name / "config.json").read_text("utf-8"))
    known = {key: shape[key] for key in ModelConfig.__dataclass_fields__ if key in shape}
    model = Transformer(ModelConfig(**known, qk_norm=True)).eval()
    weights = load_file(CASES / name / "model.safetensors")
    model.load_state_dict({key: value.float() for key, value in weights.items()})
    return model


def oracle_result(name: str, case: dict[str, Any]) -> oracle.Result:
    model = by_hand(name)

    @torch.no_grad()
    def probabilities(tokens: Sequence[int], positions: Sequence[int], visible: Tensor) -> Tensor:
        hidden = model(torch.tensor([tokens]), torch.tensor([positions]), visible[None, None])
        return model.logits(hidden)[0].softmax(-1)

    settings = DecodeConfig(**case["settings"]).resolve()
    return oracle.decode(probabilities, case["prompt_ids"], settings, MASK, (EOS,))


def wrong_in_oracle(name: str, step: int) -> list[str]:
    wrong = []
    for number, case in list(enumerate(recorded(name), 1))[::step]:
        result = oracle_result(name, case)
        found = (list(result.tokens), result.finish_reason, result.forwards, result.rows)
        wanted = (case["response_ids"], case["finish_reason"], case["forwards"], case["rows"])
        if found != wanted:
            wrong.append(f"{name} line {number}: {found} instead of {wanted}")
    return wrong


def test_all_cases_are_there() -> None:
    assert [(name, len(recorded(name))) for name, _ in FOLDERS] == FOLDERS


@pytest.mark.parametrize(("name", "step"), [("trained", 10), ("random", 19)])
def test_oracle_gives_some_of_the_recorded_answers(name: str, step: int) -> None:
    assert not wrong_in_oracle(name, step)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in FOLDERS])
def test_oracle_gives_every_recorded_answer(name: str) -> None:
    assert not wrong_in_oracle(name, 1)


def wrong_in_package(name: str, step: int) -> list[str]:
    model = refusion.load(CASES / name, dtype="float32")
    wrong = []
    for number, case in list(enumerate(recorded(name), 1))[::step]:
        result = model.generate(case["prompt_ids"], DecodeConfig(**case["settings"]))
        found = (list(result.token_ids), result.finish_reason)
        if found != (case["response_ids"], case["finish_reason"]):
            wrong.append(f"{name} line {number}: {found} instead of {case['response_ids']} {case['finish_reason']}")
        if result.stats.forwards > case["forwards"] + 1:
            wrong.append(f"{name} line {number}: {result.stats.forwards} forwards, recorded {case['forwards']}")
    return wrong


@pytest.mark.parametrize(("name", "step"), [("trained", 1), ("random", 8)])
def test_package_gives_the_recorded_answers(name: str, step: int) -> None:
    assert not wrong_in_package(name, step)


@pytest.mark.slow
def test_package_gives_every_recorded_answer_of_random_weights() -> None:
    assert not wrong_in_package("random", 1)
