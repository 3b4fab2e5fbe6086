"""Models without a download: the tiny folders of the recorded cases."""

from __future__ import annotations

from pathlib import Path

import pytest

import refusion

CASES = Path(__file__).parent / "cases" / "decode"


@pytest.fixture(scope="session")
def trained_folder() -> Path:
    """A tiny Qwen3 folder (89 word-level tokens), trained on one family of word problems."""
    return CASES / "trained"


@pytest.fixture(scope="session", params=["trained", "random"])
def any_model(request: pytest.FixtureRequest) -> refusion.Model:
    """A sure model, and an unsure one."""
    return refusion.load(str(CASES / request.param), device="cpu")
