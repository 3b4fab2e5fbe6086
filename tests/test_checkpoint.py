"""Model folders: ours load in transformers, theirs load here, broken ones are named, replaced ones are never gone."""

from __future__ import annotations

import json
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from refusion.config import DecodeConfig, UserError
from refusion.models import checkpoint
from refusion.models.checkpoint import load_model, read_config, replaced_folder, resolve_folder, save_folder
from refusion.models.tokenizer import Tokenizer
from refusion.models.transformer import ModelConfig, Transformer

SHAPE: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
OURS = {
    "llama": {"tie_word_embeddings": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qwen2": {"qkv_bias": True, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "tie_word_embeddings": False, "head_dim": 8},
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
POSITIONS = torch.tensor([[0, 1, 5, 6, 7, 2, 3, 4]])  # reordered
MASK = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]


def fresh(kind: str = "qwen3", **changes: Any) -> Transformer:
    fields = {**SHAPE, "head_dim": 4, "model_type": kind, **OURS[kind], **changes}
    model, generator = Transformer(ModelConfig(**fields)).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


def words() -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<mask>", "<unk>", *"abcdefghijklmno"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<mask>"])
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "mask")}
    return Tokenizer.from_tokenizers(tokenizer, chat_template="{{ bos_token }} {{ messages[0].content }}", **named)


@torch.no_grad()
def logits(model: Transformer) -> Tensor:
    return model.logits(model(TOKENS, POSITIONS, MASK))


@torch.no_grad()
def their_logits(model: Any) -> Tensor:
    additive = torch.zeros(MASK.shape).masked_fill(~MASK, torch.finfo(torch.float32).min)
    out: Tensor = model.float()(input_ids=TOKENS, position_ids=POSITIONS, attention_mask=additive).logits
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "model", fresh(), words(), dtype="float32")


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = {**load_file(file), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, file, metadata={"format": "pt"})


# --- to and from transformers


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("shard", [None, 4000])
def test_our_folders_load_in_transformers(tmp_path: Path, kind: str, shard: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    model, defaults = fresh(kind), DecodeConfig(slot_size=4, token_threshold=0.5, stop=("a",)).to_dict()
    path = save_folder(tmp_path / "m", model, words(), defaults=defaults, eos_token_ids=[2, 6], dtype="float32",
                       max_shard_bytes=shard, extra_files={"README.md": "# card\n"})  # fmt: skip
    assert (len(list(path.glob("model-*-of-*.safetensors"))) > 1) == (shard is not None)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (their_logits(theirs) - logits(model)).abs().max() < 1e-4
    assert torch.equal(logits(load_model(path, "cpu")), logits(model))
    assert theirs.generation_config.eos_token_id == [2, 6] and theirs.config.mask_token_id == 3
    assert transformers.AutoTokenizer.from_pretrained(path).mask_token_id == 3
    config = read_config(path)
    assert config.model == model.config and config.defaults == defaults
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id, config.mask_token_id) == ((2, 6), 1, 0, 3)
    assert config.architecture == type(theirs).__name__
    assert config.parameters == sum(p.numel() for p in theirs.parameters())
    assert (path / "README.md").read_text() == "# card\n"
    assert Tokenizer.from_folder(path).encode_chat([{"content": "a <mask> b"}]) == [1, 5, 4, 6]


THEIRS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
    "Llama-tied": {"tie_word_embeddings": True, "head_dim": 8},
    "Qwen2": {},
    "Qwen2-tied": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Qwen3-biased": {"attention_bias": True, "head_dim": 8},
}


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("old", [False, True])
def test_their_folders_load_here(tmp_path: Path, kind: str, old: bool) -> None:
    """Both forms of config.json: rope_parameters (transformers 5) and rope_theta beside rope_scaling (4)."""
    transformers = pytest.importorskip("transformers")
    family = kind.split("-")[0]
    fields = {**SHAPE, **THEIRS[kind], "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
    config = getattr(transformers, f"{family}Config")(**fields, eos_token_id=[7, 8])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    if old:
        edit(tmp_path / "config.json", rope_parameters=None, rope_theta=50000.0)
    ours = load_model(tmp_path, "cpu")
    assert ours.config.rope_theta == 50000.0 and not ours.training
    assert (logits(ours) - their_logits(model)).abs().max() < 1e-4
    read = read_config(tmp_path)
    assert read.mask_token_id is None and read.eos_token_ids == (7, 8) and read.defaults == {}


def test_published_layout(tmp_path: Path) -> None:
    """METHOD 7: 151,671 rows, vocab.json and merges.txt, a hole before the mask, whose id only config.json names."""
    base, specials, mask = 151643, 26, 151670
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    filler = {f"\u2603{i}": i for i in range(len(letters) + 2, base)}
    vocab = {letter: i for i, letter in enumerate(letters)} | {"he": len(letters), "hel": len(letters) + 1} | filler
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    names = {base: "<|endoftext|>", base + 1: "<|im_start|>", base + 2: "<|im_end|>", mask: "<|mask|>"}
    names |= {base + i: f"<extra{i}>" for i in range(3, specials)}
    added = {str(i): {"content": text, "special": True} for i, text in names.items()}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>", "bos_token": None,
                "chat_template": "<|im_start|>{{ messages[0].content }}"}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {**SHAPE, "vocab_size": 151671, "hidden_size": 8, "head_dim": 4, "num_hidden_layers": 1,
              "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000,
              "mask_token_id": mask, "eos_token_id": 151645, "sliding_window": None}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643], "top_k": 20}')
    model = Transformer(read_config(tmp_path).model)
    save_file({k: v.bfloat16() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")

    read = read_config(tmp_path)
    assert (read.mask_token_id, read.eos_token_ids, read.pad_token_id) == (151670, (151645, 151643), 151643)
    loaded = load_model(tmp_path, "cpu", "bfloat16")
    assert loaded.lm_head.weight.shape == (151671, 8) and loaded.lm_head.weight.dtype == torch.bfloat16
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 151671 and 151669 not in tokenizer.token_ids()
    assert tokenizer.mask_token == "<|mask|>" and tokenizer.mask_token_id == mask
    ids = tokenizer.encode_chat([{"content": "hello<|mask|><|im_end|>"}])
    assert (ids[0], ids[1], ids[-1]) == (base + 1, vocab["hel"], base + 2) and mask not in ids
    assert tokenizer.decode([*ids, mask, 151669]) == "hello<|mask|>"


# --- dtypes, names, ids


def test_dtypes(folder: Path) -> None:
    assert load_model(folder, "cpu").lm_head.weight.dtype == torch.float32
    assert load_model(folder, "cpu", "bfloat16").lm_head.weight.dtype == torch.bfloat16
    assert load_model(folder, "cpu", torch.float64).lm_head.weight.dtype == torch.float64
    half = save_folder(folder.parent / "half", fresh(), words())  # bfloat16 by default
    wide = load_model(half, "cpu")
    assert wide.lm_head.weight.dtype == torch.float32
    assert torch.equal(wide.lm_head.weight, fresh().lm_head.weight.bfloat16().float())
    for bad in ("float8", "int8", torch.int64):
        with pytest.raises(UserError, match="dtype must be one of float32, bfloat16"):
            load_model(folder, "cpu", bad)
    with pytest.raises(UserError, match="device 'toaster'"):
        load_model(folder, "toaster")


@pytest.mark.parametrize("stored", [True, False])
def test_tied_head(tmp_path: Path, stored: bool) -> None:
    """The head of a tied model may be left out or stored as well; rotary frequencies of old folders are ignored."""
    folder = save_folder(tmp_path / "m", fresh("qwen2"), None, dtype="float32")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    changes: dict[str, Tensor | None] = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    if stored:
        changes["lm_head.weight"] = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    edit_tensors(folder, **changes)
    model = load_model(folder, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(fresh("qwen2")))
    edit_tensors(folder, **{"lm_head.weight": torch.zeros(20, 16)})
    with pytest.raises(UserError, match="differs from the embedding"):
        load_model(folder, "cpu")


def test_special_ids_come_from_three_places(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=9, mask_token_id=None, bos_token_id=None)
    edit(folder / "generation_config.json", eos_token_id=[8, 9], bos_token_id=None, pad_token_id=11)
    read = read_config(folder)
    assert read.eos_token_ids == (8, 9, 2)  # generation_config.json, config.json, tokenizer
    assert (read.mask_token_id, read.bos_token_id, read.pad_token_id) == (3, 1, 11)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", mask_token_id=12)
    assert read_config(folder).mask_token_id == 12 == Tokenizer.from_folder(folder).mask_token_id
    (folder / "tokenizer.json").unlink()
    assert read_config(folder).eos_token_ids == (9,)


def test_defaults_of_each_type(tmp_path: Path) -> None:
    def read(**fields: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **fields}))
        return read_config(tmp_path).model

    llama, qwen2, qwen3 = read(model_type="llama"), read(model_type="qwen2"), read(model_type="qwen3")
    assert (llama.head_dim, qwen2.head_dim, qwen3.head_dim) == (4, 4, 128)  # as in transformers
    assert (llama.qkv_bias, qwen2.qkv_bias, qwen2.o_bias, qwen3.qkv_bias) == (False, True, False, False)
    assert (llama.qk_norm, qwen2.qk_norm, qwen3.qk_norm) == (False, False, True)
    assert not (llama.tie_word_embeddings or qwen2.tie_word_embeddings or qwen3.tie_word_embeddings)
    assert llama.rope_theta == 10000.0 and llama.max_position_embeddings == 2048
    assert read(model_type="llama", num_key_value_heads=None).num_key_value_heads == 4
    assert read(model_type="llama", rope_scaling={"type": "default", "rope_theta": 7.0}, rope_theta=5.0).rope_theta == 7
    assert read(model_type="qwen2", sliding_window=4, use_sliding_window=False, max_window_layers=0)
    assert read(model_type="qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=2)


# --- bad folders


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": ["x"]}, "model_type .* is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "16"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "rope_scaling: rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            r"rope_scaling.low_freq_factor \(4\) must be less",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor must be a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, r"sliding_window \(8\) is in use"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]}, "is in use"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"mask_token_id": 20}, "mask_token_id 20 is outside the vocabulary"),
        ({"mask_token_id": "x"}, "mask_token_id must be a token id"),
        ({"eos_token_id": [-1]}, "eos_token_id must be a token id"),
    ],
)
def test_bad_config_is_named(folder: Path, fields: dict[str, Any], complaint: str) -> None:
    edit(folder / "config.json", **fields)
    with pytest.raises(UserError, match=rf"config\.json: .*{complaint}") as error:
        load_model(folder, "cpu")
    assert "\n" not in str(error.value)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({NORM: None}, rf"tensor {NORM} is missing$"),
        ({NORM: None, "lm_head.weight": None}, r"is missing \(and 1 more\)$"),
        ({NORM: torch.ones(15)}, rf"tensor {NORM} has shape \[15\], but config\.json asks for \[16\]$"),
        ({NORM: torch.ones(16, dtype=torch.int8)}, "has dtype I8"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, r"model\.layers\.2\.mlp.* does not belong"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, changes: dict[str, Any], complaint: str) -> None:
    edit_tensors(folder, **changes)
    with pytest.raises(UserError, match=complaint) as error:
        load_model(folder, "cpu")
    assert str(folder / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["half", "empty", "noise"])
def test_broken_files_are_named(folder: Path, file: str, damage: str) -> None:
    content = (folder / file).read_bytes()
    (folder / file).write_bytes({"half": content[: len(content) // 2], "empty": b"", "noise": b"\xff" * 100}[damage])
    with pytest.raises(UserError) as error:
        load_model(folder, "cpu")
    assert str(folder / file) in str(error.value) and "\n" not in str(error.value)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        load_model(tmp_path / "none", "cpu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty/config\.json: no such file"):
        load_model(tmp_path / "empty", "cpu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        load_model(folder, "cpu")
    index = folder / "model.safetensors.index.json"
    for weight_map, complaint in (
        ({"a": "gone.safetensors"}, r"gone\.safetensors: no such file"),
        ({"a": "../up.safetensors"}, "weight_map must map"),
        (None, "weight_map must map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match=complaint):
            load_model(folder, "cpu")


def test_resolve_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_folder(str(folder)) == folder
    with pytest.raises(UserError, match="is a file"):
        resolve_folder(folder / "config.json")
    for name in ("nowhere", "a/b/c", "./nowhere", "/nowhere/at-all", "org/-x", "org/na me"):  # none of them a hub id
        with pytest.raises(UserError, match=f"no such model folder: {name}$"):
            resolve_folder(name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"folder: org/name \(for a hub id: pip install huggingface_hub\)$"):
        resolve_folder("org/name")

    def snapshot_download(name: str, **_: Any) -> str:
        if name == "org/name":
            return str(folder)
        raise OSError("\nhub is\nfar away")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve_folder("org/name") == folder
    with pytest.raises(UserError, match=r"folder: org/other, and the hub gave nothing for it \(hub is\)$"):
        resolve_folder("org/other")


# --- whole or not at all


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_leaves_the_new_one_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(checkpoint, "_exchanged", lambda one, other: False)
    (folder / "old.txt").write_text("")
    link = folder.parent / "link"
    link.symlink_to(folder.name)
    save_folder(link, fresh("llama"), None)
    assert read_config(folder).model.model_type == "llama" and not (folder / "old.txt").exists()
    assert listing(folder.parent) == ["link", "model"] and link.is_symlink()


def interrupted_write(folder: Path) -> None:
    with replaced_folder(folder) as new:
        (new / "half").write_text("")
        raise KeyboardInterrupt


@pytest.mark.parametrize("exchange", [True, False])
def test_a_failed_write_leaves_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    before = listing(folder)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(UserError, match=r"cannot be written .*No space left"):
            save_folder(folder, fresh("llama"), None)
    if not exchange:
        monkeypatch.setattr(checkpoint, "_exchanged", lambda one, other: False)
        real = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: full() if str(a).endswith(".tmp") else real(a, b))
        with pytest.raises(UserError, match="cannot be written"):
            save_folder(folder, fresh("llama"), None)
    with pytest.raises(KeyboardInterrupt):
        interrupted_write(folder)
    assert listing(folder) == before and listing(folder.parent) == ["model"]
    load_model(folder, "cpu")


def test_exchange_is_one_step_here(tmp_path: Path) -> None:
    """Where the system can exchange two folders, no moment is without one."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (one / "a").write_text("")
    if not checkpoint._exchanged(one, other):
        pytest.skip("this system or file system cannot exchange folders")
    assert listing(one) == [] and listing(other) == ["a"]


def test_only_model_folders_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    save_folder(tmp_path / "work", fresh(), None)  # an empty folder is fine
    shutil.rmtree(tmp_path / "work")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("")
    with pytest.raises(UserError, match="is no model folder"):
        save_folder(tmp_path / "work", fresh(), None)
    with pytest.raises(UserError, match="is a file"):
        save_folder(tmp_path / "work" / "thesis.txt", fresh(), None)
    assert listing(tmp_path / "work") == ["thesis.txt"]
    assert load_model(save_folder(tmp_path / "new" / "deep", fresh(), None), "cpu").config == fresh().config
