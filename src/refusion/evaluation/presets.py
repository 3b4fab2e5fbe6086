"""Settings under which benchmarks are run: the paper's, one for each task, and one for all.

Contract: a flag that was given wins over the preset, the preset over what the model's folder says, and that over the package's
defaults. Only the length of the answer concerns every method; the rest belongs to slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from refusion.config import DecodeConfig, UserError, nearest
from refusion.generate import Config, Model

MAX_NEW_TOKENS = 512  # the paper's, for all tasks
PRESETS = ("default", "paper")

# The paper's settings, by task: slot threshold, token threshold, slot size, block size.
PAPER = {
    "mmlu-pro": (0.9, 0.4, 16, 128),
    "arc-c": (0.8, 0.1, 8, 8),
    "gsm8k": (0.9, 0.4, 32, 128),
    "math": (0.8, 0.6, 32, 64),
    "gpqa": (0.8, 0.2, 8, 16),
    "humaneval": (0.9, 0.4, 32, 128),
    "mbpp": (0.9, 0.3, 32, 128),
}
NAMES = ("slot_threshold", "token_threshold", "slot_size", "block_size")


def preset(name: str, task: str) -> Mapping[str, Any]:
    """The settings of a preset for a task.

    "default": the model's own settings, the same for every task, and answers of up to 512 tokens. Raises `UserError` for an unknown
    preset, and for a task that the paper does not have.
    """
    if name not in PRESETS:
        raise UserError(f"--preset must be one of {', '.join(PRESETS)}, got {name!r}{nearest(name, PRESETS)}")
    if name == "default":
        return {"max_new_tokens": MAX_NEW_TOKENS}
    if task not in PAPER:
        raise UserError(f"--preset paper: the paper has no settings for {task}, only for {', '.join(PAPER)}")
    return {"max_new_tokens": MAX_NEW_TOKENS, **dict(zip(NAMES, PAPER[task], strict=True)), "temperature": 0.0}


def with_preset(config: Config, model: Model, settings: Mapping[str, Any]) -> Config:
    """The settings with nothing unset; raises `UserError` where the model cannot do them.

    A given slot that is larger than the preset's block takes a block of its own size, as `resolve` has it.
    """
    if not isinstance(config, DecodeConfig):
        length = settings["max_new_tokens"] if config.max_new_tokens is None else config.max_new_tokens
        return model.settings(replace(config, max_new_tokens=length))
    return model.settings(config.resolve({**model.folder.defaults, **settings}))
