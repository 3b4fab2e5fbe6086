"""`refusion convert`: folders of all shapes, GGUF files that the test writes itself, and SmolLM2 where its wheel is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

import refusion
from refusion.cli import main
from refusion.config import UserError
from refusion.models import gguf
from refusion.models.checkpoint import load_model, read_config, save_folder
from refusion.models.convert import WHEELS, convert, read_source, wheel_file
from refusion.models.tokenizer import Tokenizer
from refusion.models.transformer import ModelConfig, Transformer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def vocabulary(reserved: int = 0, learnt: int = 0) -> Tokenizer:
    """Two specials, `reserved` that are never used, 256 bytes, and `learnt` pairs of them."""
    specials = ["<|im_start|>", "<|im_end|>", *(f"<reserved_{i}>" for i in range(reserved))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=258 + reserved + learnt,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    plain.train_from_iterator(["apples", "apple", "app"] * 3 if learnt else [], trainer)
    return Tokenizer.from_tokenizers(plain, chat_template=TEMPLATE, eos_token="<|im_end|>")


def shape(kind: str = "llama", rows: int = 258, **more: Any) -> ModelConfig:
    return ModelConfig(
        kind, rows, 32, 48, 2, 4, 2, 8, max_position_embeddings=256, **{"tie_word_embeddings": True, **more}
    )


def source(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> Transformer:
    model = Transformer(config).initialize(torch.Generator().manual_seed(3))
    for name, parameter in model.named_parameters():
        if "embed" in name or "lm_head" in name:
            torch.nn.init.normal_(parameter, 0.5, 1.0)
    save_folder(folder, model.eval(), tokenizer, dtype="float32")
    return model


def logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([tokens])
        return model.logits(model(ids, torch.arange(len(tokens))[None]))[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("rows", "new_rows", "after"), [(258, 62, 320), (300, 0, 300)])
def test_a_new_mask_token(tmp_path: Path, tied: bool, rows: int, new_rows: int, after: int) -> None:
    """In a row that no token has, else in new ones; everything else as it was."""
    before = source(tmp_path / "a", shape(rows=rows, tie_word_embeddings=tied), vocabulary())
    made = convert(tmp_path / "a", tmp_path / "b", dtype="float32")
    assert (made.mask_token, made.mask_token_id, made.new_rows) == ("<|mask|>", 258, new_rows)
    config = read_config(tmp_path / "b")
    assert config.model.vocab_size == after and config.mask_token_id == 258 and config.eos_token_ids == (1,)
    model = load_model(tmp_path / "b", "cpu")
    for old, new in [
        (before.model.embed_tokens.weight, model.model.embed_tokens.weight), (before.lm_head.weight, model.lm_head.weight),
    ]:  # fmt: skip
        assert torch.equal(new[:258], old[:258]) and torch.allclose(new[258], old[:258].mean(0), atol=1e-6)
        if new_rows:
            assert torch.equal(new[258:], new[258].expand(62, -1))
        else:
            assert torch.equal(new[259:], old[259:])  # rows without a token stay
    tokens = [0, 70, 71, 72, 1]
    assert torch.allclose(logits(model, tokens)[:, :258], logits(before, tokens)[:, :258], atol=1e-5)
    written = refusion.load(tmp_path / "b", "cpu")
    assert 258 not in written.tokenizer.encode("a<|mask|>b") and written.tokenizer.chat_template == TEMPLATE
    result = written.generate("hello", refusion.DecodeConfig(max_new_tokens=12, slot_size=4, block_size=8))
    assert 258 not in result.token_ids
    same = written.generate("hello", refusion.AutoregressiveConfig(max_new_tokens=12))
    plain = refusion.load(tmp_path / "a", "cpu").generate("hello", refusion.AutoregressiveConfig(max_new_tokens=12))
    assert same.token_ids == plain.token_ids


def test_a_token_that_is_there(tmp_path: Path) -> None:
    source(tmp_path / "a", shape(rows=261), vocabulary(reserved=3))
    made = convert(tmp_path / "a", tmp_path / "b", mask_token="<reserved_1>")
    assert (made.mask_token_id, made.new_rows) == (3, 0)
    tokenizer = Tokenizer.from_folder(tmp_path / "b")
    assert 3 not in tokenizer.encode("<reserved_1>") and tokenizer.mask_token == "<reserved_1>"


def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source(tmp_path / "a", shape("qwen2", qkv_bias=True), vocabulary())
    convert(tmp_path / "a", tmp_path / "b", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32).eval()
    tokens = [0, 70, 258, 258, 1]
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    assert (logits(load_model(tmp_path / "b", "cpu"), tokens) - want).abs().max() < 1e-4
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "b").mask_token_id == 258


def test_what_cannot_be_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source(tmp_path / "a", shape(), vocabulary())
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(30))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("mine")
    for arguments, complaint in [
        (["nano", "x"], "has a mask token already"),
        ([str(tmp_path / "none"), "x"], "no such model folder"),
        (["smollm2-135n", "x"], "did you mean 'smollm2-135m'"),
        ([str(tmp_path / "none.gguf"), "x"], "no such model file"),
        ([str(tmp_path / "broken.gguf"), "x"], "not a GGUF file"),
        ([str(tmp_path / "a"), str(tmp_path / "work")], "is no model folder"),
        ([str(tmp_path / "a"), "x", "--mask-token", "<|im_end|>"], "is the end"),
        ([str(tmp_path / "a"), "x", "--mask-token", ""], "mask_token"),
        ([str(tmp_path / "a"), "x", "--dtype", "int8"], "dtype must be one of"),
    ]:
        assert main(["convert", *arguments]) == 2, arguments
        said = capsys.readouterr().err
        assert complaint in said and len(said.splitlines()) == 1, said
    assert not Path("x").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source(tmp_path / "a", shape(), vocabulary())
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["mask_token_id"], said["new_rows"], said["folder"]) == (258, 62, str(tmp_path / "b"))
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "c")]) == 0
    assert "mask token '<|mask|>' = 258, in 62 new rows" in capsys.readouterr().out


# --- GGUF


def write_gguf(path: Path, model: Transformer, tokenizer: Tokenizer, *, drop: str = "", **fields: Any) -> None:
    """As llama.cpp's own converter writes a model: its names, its order of the rows of q and k."""
    writer_of = pytest.importorskip("gguf").GGUFWriter
    config, kind = model.config, str(fields.get("architecture", model.config.model_type))
    writer = writer_of(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if fields.get("linear"):
        writer.add_rope_scaling_type(pytest.importorskip("gguf").RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(fields["linear"])
    spec = json.loads(tokenizer._json)
    vocab = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    special = {token["content"] for token in spec["added_tokens"]}
    writer.add_tokenizer_model(fields.get("cutter", "gpt2"))
    writer.add_tokenizer_pre(fields.get("cut", "gpt-2"))
    writer.add_token_list(vocab)
    writer.add_token_types([3 if text in special else 1 for text in vocab])
    if merges := [" ".join(pair) for pair in spec["model"]["merges"]]:
        writer.add_token_merges(merges)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    inner, outer = ({ours: theirs for theirs, ours in table.items()} for table in (gguf.STEMS, gguf.OUTER))
    for name, weight in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or (drop and name.startswith(drop)):
            continue
        stem, _, end = name.rpartition(".")
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            theirs = f"blk.{layer}.{inner[stem]}.{end}"
        else:
            theirs = f"{outer[stem]}.{end}"
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(theirs, weight.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "config",
    [
        shape(rows=261), shape(rows=261, tie_word_embeddings=False, rms_norm_eps=2.0**-10, rope_theta=5000.0),
        shape("qwen2", rows=261, qkv_bias=True), shape("qwen3", rows=261, qk_norm=True),
    ],
    ids=["llama", "llama-untied", "qwen2", "qwen3"],
)  # fmt: skip
def test_gguf(tmp_path: Path, config: ModelConfig) -> None:
    """The same weights, tokens and answers as from the folder that the file was made of."""
    tokenizer = vocabulary(learnt=3)
    model = source(tmp_path / "a", config, tokenizer)
    write_gguf(tmp_path / "a.gguf", model, tokenizer)
    found = read_source(tmp_path / "a.gguf")
    assert found.eos_token_ids == (1,) and found.tokenizer.chat_template == TEMPLATE
    tokens = found.tokenizer.encode("<|im_start|>It's 1,234 apples<|im_end|>")
    assert tokens == tokenizer.encode("<|im_start|>It's 1,234 apples<|im_end|>")
    assert torch.equal(logits(found.model, tokens), logits(model, tokens))
    convert(tmp_path / "a.gguf", tmp_path / "b", dtype="float32")
    convert(tmp_path / "a", tmp_path / "c", dtype="float32")
    one, two = load_model(tmp_path / "b", "cpu"), load_model(tmp_path / "c", "cpu")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_gguf_stretched(tmp_path: Path) -> None:
    tokenizer = vocabulary()
    write_gguf(tmp_path / "a.gguf", Transformer(shape()).initialize(torch.Generator()), tokenizer, linear=4.0)
    scaling = read_source(tmp_path / "a.gguf").model.config.rope_scaling
    assert scaling is not None and (scaling.rope_type, scaling.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"architecture": "gpt2"}, "architecture 'gpt2' is not supported"),
        ({"cutter": "llama"}, "tokenizer.ggml.model 'llama' is not supported"),
        ({"cut": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported"),
        ({"drop": "model.norm"}, "model.norm.weight is missing"),
    ],
)
def test_gguf_not_supported(tmp_path: Path, fields: dict[str, Any], complaint: str) -> None:
    model = Transformer(shape()).initialize(torch.Generator())
    write_gguf(tmp_path / "a.gguf", model, vocabulary(), **fields)
    with pytest.raises(UserError, match=f"a.gguf: .*{complaint}"):
        read_source(tmp_path / "a.gguf")


def test_gguf_cut_short(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", Transformer(shape()).initialize(torch.Generator()), vocabulary())
    data = (tmp_path / "a.gguf").read_bytes()
    for length in (10, 100, len(data) // 2, len(data) - 100):
        (tmp_path / "a.gguf").write_bytes(data[:length])
        with pytest.raises(UserError, match=r"a\.gguf"):
            read_source(tmp_path / "a.gguf")


# --- SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> Any:
    pytest.importorskip("gguf")
    try:
        wheel_file("smollm2-135m")
    except UserError as error:
        pytest.skip(str(error))
    return read_source("smollm2-135m")


@pytest.mark.slow
def test_smollm2_equals_the_loader_of_transformers(smollm2: Any) -> None:
    pytest.importorskip("accelerate", reason="the loader of GGUF needs it")
    transformers = pytest.importorskip("transformers")
    path = wheel_file("smollm2-135m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    state = theirs.state_dict()
    ours = smollm2.model.state_dict()
    assert all(torch.equal(ours[name], state[name]) for name in ours if name != "lm_head.weight")
    assert smollm2.tokenizer.encode("12 x 345") == [33, 34, 1792, 216, 35, 36, 37]  # every digit a token
    assert smollm2.mask_token == WHEELS["smollm2-135m"].mask_token and smollm2.license == "apache-2.0"


@pytest.mark.slow
def test_smollm2_converted(smollm2: Any, tmp_path: Path) -> None:
    made = convert("smollm2-135m", tmp_path / "smol")
    assert (made.mask_token_id, made.new_rows) == (16, 0)
    model = refusion.load(tmp_path / "smol", "cpu")
    answer = model.generate("What is the capital of France?", refusion.AutoregressiveConfig(max_new_tokens=24))
    assert "Paris" in answer.text and answer.finish_reason == "stop"
