"""Tokenizers: the mask cannot be typed, ids stay as filed, folders and templates read as transformers reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.config import UserError
from refusion.models.tokenizer import Tokenizer, special_ids

CORPUS = ["Ann has 12 apples.", "the quick brown fox jumps over the lazy dog", "naïve café 東京 🙂 don't we'll"] * 3
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
CHATML = (
    "{% for m in messages %}\n{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Ann has 12 apples."}, {"role": "assistant", "content": "<|mask|> ok"}]


def train(regex: bool = True) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def fresh() -> Tokenizer:
    return Tokenizer.from_tokenizers(
        train(), chat_template=CHATML, mask_token="<|mask|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


TOKENIZER = fresh()


def word_level() -> dict[str, Any]:
    """A tokenizer.json whose mask token stands in the base vocabulary, where any word may reach it."""
    vocab = {"<pad>": 0, "<mask>": 1, "a": 2, "b": 3, "<unk>": 4}
    cut = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    return {
        "version": "1.0", "truncation": cut,
        "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None, "decoder": None, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }  # fmt: skip


# --- the mask token


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*SPECIALS, "<|", "mask", "|>", " ", "apples", "\n"]), max_size=12))
def test_no_text_becomes_the_mask(parts: list[str]) -> None:
    text = "".join(parts)
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.mask_token_id not in ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert TOKENIZER.mask_token_id not in TOKENIZER.encode_chat([{"role": "user", "content": text}])


def test_other_special_tokens_keep_their_ids() -> None:
    ids = TOKENIZER.encode("<|im_start|>Ann<|mask|><|im_end|>")
    assert (ids[0], ids[-1]) == (SPECIALS.index("<|im_start|>"), SPECIALS.index("<|im_end|>"))
    assert TOKENIZER.mask_token_id == SPECIALS.index("<|mask|>") == TOKENIZER.token_to_id("<|mask|>")


@pytest.mark.parametrize("added", [False, True])
def test_mask_in_the_base_vocabulary(added: bool) -> None:
    spec = word_level()
    if added:
        spec["added_tokens"] = [{"id": 1, "content": "<mask>", "special": True, "single_word": False, "lstrip": True,
                                 "rstrip": False, "normalized": False}]  # fmt: skip
    tokenizer = Tokenizer(spec, {"mask_token": "<mask>"}, {})
    assert tokenizer.encode("a <mask> b a a") == [2, 4, 3, 2, 2]  # not cut to 2 either
    assert tokenizer.mask_token_id == 1 and tokenizer.vocab_size == 5


@pytest.mark.parametrize("merges", [["a b", "ab c"], [["a", "b"], ["ab", "c"]]])
def test_mask_made_by_merges(merges: list[Any]) -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": None}
    spec = {**word_level(), "model": model}
    assert Tokenizer(spec, {}, {}).encode("abc") == [4]
    assert Tokenizer(spec, {"mask_token": "abc"}, {}).encode("abc") == [3, 2]
    assert Tokenizer(spec, {"mask_token": "ab"}, {}).encode("abc") == [0, 1, 2]
    whole = {**spec, "model": {**model, "ignore_merges": True}}
    assert Tokenizer(whole, {"mask_token": "abc"}, {}).encode("abc") == [3, 2]


def test_mask_in_unigram() -> None:
    pieces = [["<unk>", 0.0], ["a", -1.0], ["<m>", -1.0], ["<", -2.0], ["m", -2.0], [">", -2.0]]
    spec = {**word_level(), "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}}
    assert Tokenizer(spec, {}, {}).encode("a<m>") == [1, 2]
    assert Tokenizer(spec, {"mask_token": "<m>"}, {}).encode("a<m>") == [1, 3, 4, 5]


def test_mask_must_not_be_the_unknown_token() -> None:
    with pytest.raises(UserError, match="unknown token"):
        Tokenizer(word_level(), {"mask_token": "<unk>"}, {})


def test_decode_of_the_mask_and_of_ids_without_token() -> None:
    ids = TOKENIZER.encode("Ann 🙂")
    mask = TOKENIZER.mask_token_id
    assert mask is not None
    assert TOKENIZER.decode([mask, *ids, mask, 9999]) == "Ann 🙂"
    assert TOKENIZER.decode([*ids, mask, *ids], skip_special_tokens=False) == "Ann 🙂<|mask|>Ann 🙂"
    assert TOKENIZER.decode([]) == ""
    bare = Tokenizer(json.loads(train().to_str()), {}, {}, mask_token_id=400)  # a mask row without a token
    assert bare.mask_token is None and bare.decode([400, *ids], skip_special_tokens=False) == "Ann 🙂"
    assert 400 not in bare.token_ids() and bare.vocab_size == 320


def test_prefixes_of_a_byte_stream_end_in_a_replacement_character() -> None:
    ids = TOKENIZER.encode("x🦙")
    assert len(ids) > 2
    partial = [TOKENIZER.decode(ids[:n]) for n in range(len(ids) + 1)]
    assert partial[1] == "x" and partial[2].endswith("\ufffd") and partial[-1] == "x🦙"


# --- ids as filed


def byte_level_folder(folder: Path, added: dict[str, Any], kind: str = "Qwen2Tokenizer", **more: Any) -> Path:
    """vocab.json + merges.txt without the special tokens, which only tokenizer_config.json knows."""
    spec = json.loads(train().to_str())["model"]
    vocab = {text: i - len(SPECIALS) for text, i in spec["vocab"].items() if text not in SPECIALS}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")
    config = {"tokenizer_class": kind, "added_tokens_decoder": added, "eos_token": "<|im_end|>", **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def flags(content: str, special: bool = True) -> dict[str, Any]:
    return {"content": content, "special": special, "lstrip": False, "rstrip": False, "normalized": False}


ADDED = {str(316 + i): flags(text) for i, text in enumerate(SPECIALS[:3])}


def test_holes_between_added_tokens_stay(tmp_path: Path) -> None:
    """METHOD 7: an unused id before the mask. The tokenizers library alone would close the gap."""
    added = {**ADDED, "320": flags("<|mask|>"), "322": flags("<tool>", special=False)}
    byte_level_folder(tmp_path, added)
    (tmp_path / "config.json").write_text('{"mask_token_id": 320}', encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<tool>") == [322] and tokenizer.mask_token == "<|mask|>"
    assert tokenizer.vocab_size == 323 and not {319, 321} & tokenizer.token_ids()
    assert 320 not in tokenizer.encode("a<|mask|>b") and tokenizer.eos_token_id == 318
    assert tokenizer.decode([322, 318]) == "<tool>"
    assert special_ids(tmp_path) == {"eos_token": 318}
    again = tmp_path / "again"
    again.mkdir()
    tokenizer.save(again)
    (again / "config.json").write_text('{"mask_token_id": 320}', encoding="utf-8")
    other = Tokenizer.from_folder(again)
    assert other.encode("<tool>Ann") == tokenizer.encode("<tool>Ann") and other.token_ids() == tokenizer.token_ids()


def test_old_added_tokens_file(tmp_path: Path) -> None:
    byte_level_folder(tmp_path, {})
    (tmp_path / "added_tokens.json").write_text('{"<|im_end|>": 317, "<x>": 319}', encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a<x><|im_end|>")[-2:] == [319, 317]
    assert tokenizer.decode([319, 317]) == "<x>"  # the named special token is special, the other one is not


@pytest.mark.parametrize(("kind", "ours"), [("Qwen2Tokenizer", True), ("GPT2Tokenizer", False)])
def test_vocabulary_files_read_as_transformers_reads_them(tmp_path: Path, kind: str, ours: bool) -> None:
    transformers = pytest.importorskip("transformers")
    byte_level_folder(tmp_path, {str(k): v for k, v in ADDED.items()}, kind, unk_token="<|endoftext|>",
                      bos_token="<|endoftext|>", pad_token="<|endoftext|>")  # fmt: skip
    reference = getattr(transformers, kind).from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in ["Ann has 123456 apples.", "don't WE'LL x'S", "cafe\u0301  a \n\n b\r\n", "<|im_start|>user\n🙂東京"]:
        want = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text) == want
        assert tokenizer.decode(want, skip_special_tokens=False) == reference.decode(want)
    composed, apart = tokenizer.encode("caf\u00e9"), tokenizer.encode("cafe\u0301")
    assert (composed == apart) is ours  # Qwen normalises, GPT-2 does not


# --- chat templates


def test_chat_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    TOKENIZER.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    want = reference.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, return_dict=False)
    assert TOKENIZER.encode_chat(MESSAGES[:1]) == want
    assert TOKENIZER.render_chat(MESSAGES) == reference.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False
    )
    assert reference.mask_token_id == TOKENIZER.mask_token_id and reference.eos_token == "<|im_end|>"
    assert reference("<|mask|>")["input_ids"] == [TOKENIZER.mask_token_id]  # theirs can be injected, ours cannot


def test_template_features() -> None:
    template = (
        "{{ bos_token }}{%- for m in messages %}\n{% if m.role == 'bad' %}\n    {{ raise_exception('no bad role') }}\n"
        "  {% endif %}\n  {% generation %}{{ m.content | tojson }}{% endgeneration %}\n  {% if loop.first %}\n"
        "  {% continue %}\n  {% endif %}\n!{%- endfor %}"
        "{{ tools is none }}{{ add_generation_prompt }}{{ strftime_now('%Y')|length }}{{ thinking }}"
    )
    tokenizer = Tokenizer.from_tokenizers(train(), chat_template=template, bos_token="<|im_start|>")
    text = tokenizer.render_chat([{"role": "user", "content": "<é>"}, {"role": "x", "content": 1}], thinking="T")
    assert "".join(text.split()) == '<|im_start|>"<é>"1!TrueTrue4T'
    assert tokenizer.encode_chat([]).count(1) == 1  # the beginning-of-sequence token stands once
    with pytest.raises(UserError, match=r"^chat template: no bad role$"):
        tokenizer.render_chat([{"role": "bad", "content": ""}])


@pytest.mark.parametrize("template", ["{{ messages.__class__.__mro__ }}", "{% for %}", "{{ messages[0] + 1 }}",
                                      "{% set _ = messages.append(1) %}", "{{ 1 / 0 }}"])  # fmt: skip
def test_bad_templates_are_one_line(template: str) -> None:
    tokenizer = Tokenizer.from_tokenizers(train(), chat_template=template)
    with pytest.raises(UserError, match=r"^chat template: [^\n]+$"):
        tokenizer.render_chat(MESSAGES)


def test_where_templates_come_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    byte_level_folder(tmp_path, ADDED, chat_template=named)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.render_chat([]) == "D" and tokenizer.render_chat([], tools=[{}]) == "T"
    again = tmp_path / "again"
    again.mkdir()
    tokenizer.save(again)
    assert Tokenizer.from_folder(again).render_chat([], tools=[{}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).chat_template == "J"
    bare = Tokenizer.from_tokenizers(train())
    assert not bare.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        bare.encode_chat(MESSAGES)


# --- the tokenizer's own specials; bad input; imports


def test_own_special_tokens_only_on_request() -> None:
    tokenizer = train()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    wrapped = Tokenizer.from_tokenizers(tokenizer)
    assert wrapped.encode("Ann", add_special_tokens=True) == [1, *wrapped.encode("Ann")]
    assert 1 not in wrapped.encode("Ann")


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: not valid JSON"),
        ("tokenizer.json", "[]", r"tokenizer\.json: must hold a JSON object"),
        ("tokenizer.json", '{"model": {}}', r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": "b"}}}', r"not a tokenizer that can be read"),
        ("tokenizer_config.json", '{"chat_template": [1]}', r"tokenizer_config\.json: chat_template"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', r"added tokens"),
        ("merges.txt", "a b c\n", r"merges\.txt: every line"),
        ("vocab.json", "\udcff", r"vocab\.json: not valid JSON"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    byte_level_folder(tmp_path, ADDED)
    (tmp_path / file).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=complaint) as error:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        Tokenizer.from_folder(tmp_path / "none")
    with pytest.raises(UserError, match="holds no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    byte_level_folder(tmp_path, ADDED)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UserError, match=r"merges\.txt: no such file"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(UserError, match="eos_token '<nope>'"):
        Tokenizer.from_tokenizers(train(), eos_token="<nope>")
    with pytest.raises(UserError, match="cannot encode"):
        TOKENIZER.encode("\ud800")


def test_imports_no_torch() -> None:
    code = "import sys, refusion.models.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
