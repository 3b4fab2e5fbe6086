"""Stretched rotary embeddings: equal to transformers, in both forms of config.json, and written as they were read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from refusion.models.checkpoint import load_model, read_config, save_folder

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-whole": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
        "attention_factor": 1.25, "truncate": False,
    },
    "yarn-weights": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.5,
    },
}  # fmt: skip
SHAPE = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("old", [False, True])
def test_equal_to_transformers(tmp_path: Path, family: str, kind: str, old: bool) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_theta": 5000.0, **SCALINGS[kind]}
    config = getattr(transformers, f"{family}Config")(**SHAPE, rope_parameters=rope)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    if old:
        path = tmp_path / "theirs" / "config.json"
        fields = json.loads(path.read_text()) | {"rope_theta": 5000.0, "rope_scaling": SCALINGS[kind]}
        del fields["rope_parameters"]
        path.write_text(json.dumps(fields))
    ours = load_model(tmp_path / "theirs", "cpu")
    tokens = torch.arange(24)[None] % 40
    positions = torch.tensor([[*range(8), *range(200, 212), *range(490, 494)]])
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        want = theirs(tokens, position_ids=positions).logits
        got = ours.logits(ours(tokens, positions, causal))
        assert (got - want).abs().max() < 1e-4
        save_folder(tmp_path / "ours", ours, None, dtype="float32")
        again = getattr(transformers, f"{family}ForCausalLM").from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
        assert (again(tokens, position_ids=positions).logits - want).abs().max() < 1e-4
    assert read_config(tmp_path / "ours").model == ours.config
