"""Text <-> token ids, and chat messages -> prompt ids, from the files of a Hugging Face folder.

Contract: `encode` never returns the mask token's id, whatever the text says (docs/traps.md, 8). The token with this id
is taken out of the vocabulary that encodes, so its literal text is spelt with ordinary tokens; `save` writes it back.
Every added token has the id that its file says, holes included: the `tokenizers` library alone numbers them afresh.
This module knows no model, no tensors (it does not import torch) and no slots.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from refusion.config import UserError

SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
# How Qwen2 and Qwen3 cut text before byte-pair merging: part of the format, spelt out where tokenizer.json is missing.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # how tokenizers with byte fallback spell a byte
# How byte-level tokenizers spell bytes: what can be seen as itself, the others in order from U+0100.
_SEEN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_UNSEEN = (byte for byte in range(256) if byte not in _SEEN)
BYTE_LEVEL = {chr(byte): byte for byte in _SEEN} | {chr(0x100 + i): byte for i, byte in enumerate(_UNSEEN)}

Message = Mapping[str, Any]
Spec = dict[str, Any]  # the content of a tokenizer.json


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UserError` naming the file when it is missing, broken or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({one_line(error)})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return value


def one_line(error: object) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())


def special_ids(folder: Path) -> dict[str, int]:
    """Ids of the named special tokens (`eos_token`, ...) that the tokenizer files of a folder define.

    Cheaper than loading the tokenizer; {} for a folder without tokenizer files.
    """
    if not _has_tokenizer(folder):
        return {}
    ids = _ids(_read_spec(folder))
    return {name: ids[text] for name, text in _named_specials(_settings(folder)).items() if text in ids}


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    >>> tokenizer = Tokenizer.from_folder("my-model")        # doctest: +SKIP
    >>> tokenizer.decode(tokenizer.encode("Hello there"))    # doctest: +SKIP
    'Hello there'
    """

    def __init__(
        self, spec: Spec, specials: Mapping[str, str], templates: Mapping[str, str], mask_token_id: int | None = None,
        extra_specials: Sequence[str] = (), source: str = "tokenizer",
    ) -> None:  # fmt: skip
        """spec: a tokenizer.json; specials: texts by name; templates: chat templates by name ("default").

        `mask_token_id` wins over the text in `specials`. Raises `UserError` naming `source` when they do not fit.
        """
        spec = _pinned(spec)
        ids = _ids(spec)
        self._json = json.dumps(spec, ensure_ascii=False)
        self._specials = dict(specials)
        self._extra_specials = tuple(extra_specials)
        self._templates = dict(templates)
        self._ids = frozenset(ids.values())
        self.mask_token_id = ids.get(specials.get("mask_token", "")) if mask_token_id is None else mask_token_id
        if self.mask_token_id in self._ids:
            self._specials["mask_token"] = next(text for text, i in ids.items() if i == self.mask_token_id)
            spec = _without(spec, self.mask_token_id, source)
        else:
            self._specials.pop("mask_token", None)
        self._tokenizer = _build(spec, source)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json, or vocab.json + merges.txt, and the settings beside them.

        The mask token is the one of config.json's `mask_token_id`, else the tokenizer's `mask_token`.
        Raises `UserError` naming the file that is missing or broken.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"no such model folder: {folder}")
        if not _has_tokenizer(folder):
            raise UserError(f"{folder}: holds no tokenizer (tokenizer.json, or vocab.json and merges.txt)")
        settings = _settings(folder)
        mask_token_id = _optional_json(folder / "config.json").get("mask_token_id")
        if mask_token_id is not None and not _is_id(mask_token_id):
            raise UserError(f"{folder / 'config.json'}: mask_token_id must be a token id, got {mask_token_id!r:.40}")
        return cls(
            _read_spec(folder), _named_specials(settings), _templates(folder, settings), mask_token_id,
            _extra_specials(settings), str(_spec_path(folder)),
        )  # fmt: skip

    @classmethod
    def from_tokenizers(
        cls, tokenizer: tokenizers.Tokenizer, *, chat_template: str | None = None, mask_token: str | None = None,
        eos_token: str | None = None, pad_token: str | None = None, bos_token: str | None = None,
    ) -> Tokenizer:  # fmt: skip
        """Wrap a tokenizer of the `tokenizers` library, say a freshly trained one; it must know the tokens named."""
        names = {"mask_token": mask_token, "eos_token": eos_token, "pad_token": pad_token, "bos_token": bos_token}
        specials = {name: text for name, text in names.items() if text is not None}
        for name, text in specials.items():
            if tokenizer.token_to_id(text) is None:
                raise UserError(f"{name} {text!r} is not a token of this tokenizer")
        templates = {} if chat_template is None else {"default": chat_template}
        return cls(json.loads(tokenizer.to_str()), specials, templates)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens written in it count as such, except the mask token.

        add_special_tokens: also put what the tokenizer itself puts around a text (usually a beginning-of-sequence).
        """
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises bare Exception, and TypeError for lone surrogates
            raise UserError(f"the tokenizer cannot encode this text: {one_line(error)}") from None
        assert self.mask_token_id is None or self.mask_token_id not in ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a token are passed over.

        Decoding a prefix of a byte-level token stream may end in U+FFFD (a character whose bytes are not all
        there yet): whoever streams text decodes all ids so far each time, and holds such an ending back.
        """
        mask = self.mask_token_id
        if mask is None or skip_special_tokens or self.mask_token is None:
            return self._tokenizer.decode([i for i in ids if i != mask], skip_special_tokens=skip_special_tokens)
        parts: list[list[int]] = [[]]
        for i in ids:
            if i == mask:
                parts.append([])
            else:
                parts[-1].append(i)
        return self.mask_token.join(self._tokenizer.decode(part, skip_special_tokens=False) for part in parts)

    def token_text(self, token_id: int) -> str | bytes:
        """What a token adds to a text that has begun: bytes where they are no whole characters.

        A special token adds its name, an id without a token nothing.
        """
        once = self.decode([token_id], skip_special_tokens=False)  # some tokenizers drop a space at the start
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        text = twice[len(once) :] if twice.startswith(once) else once
        spelling = self.id_to_token(token_id) or ""
        if "\ufffd" not in twice:
            return text
        if BYTE_TOKEN.fullmatch(spelling):
            return bytes([int(spelling[3:5], 16)])
        if all(character in BYTE_LEVEL for character in spelling):
            data = bytes(BYTE_LEVEL[character] for character in spelling)
            try:
                return data.decode()
            except UnicodeDecodeError:
                return data
        return text

    def encode_chat(self, messages: Sequence[Message], **template_kwargs: Any) -> list[int]:
        """Prompt ids of a chat: the rendered template, whose special tokens are the only ones (none is added)."""
        return self.encode(self.render_chat(messages, **template_kwargs))

    def render_chat(self, messages: Sequence[Message], **template_kwargs: Any) -> str:
        """The chat template's text for `messages` (each {"role": ..., "content": ...}), open for the answer.

        template_kwargs reach the template: `tools`, `add_generation_prompt=False`, `enable_thinking`, ...
        Raises `UserError` when there is no template, or with what the template complains of.
        """
        if not self.has_chat_template:
            raise UserError("this model's tokenizer has no chat template")
        name = "tool_use" if template_kwargs.get("tools") and "tool_use" in self._templates else "default"
        source = self._templates.get(name) or next(iter(self._templates.values()))
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **self._template_specials}
        try:
            return _compiled(source).render(messages=[dict(m) for m in messages], **{**variables, **template_kwargs})
        except Exception as error:  # a template is a program: it can fail in any way
            raise UserError(f"chat template: {one_line(error)}") from None

    @cached_property
    def _template_specials(self) -> dict[str, Any]:
        extra = {"additional_special_tokens": list(self._extra_specials)} if self._extra_specials else {}
        return {**self._specials, **extra}

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template."""
        return self._templates.get("default") or next(iter(self._templates.values()), None)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that decides how text becomes ids: the files' content, special tokens and templates."""
        parts = [self._json, self._specials, self._templates, self._extra_specials, self.mask_token_id]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def with_mask(self, text: str) -> Tokenizer:
        """The same tokenizer with `text` as its mask token: a token that it has, or a new one after the last.

        Raises `UserError` when there is a mask token already, or the text is empty.
        """
        if self.mask_token_id is not None:
            raise UserError(f"the tokenizer has a mask token already ({self.mask_token or self.mask_token_id})")
        if not text.strip():
            raise UserError("mask_token must not be empty")
        spec = json.loads(self._json)
        known = _ids(spec)
        if text not in known:
            known[text] = max(known.values(), default=-1) + 1
        if text not in {token["content"] for token in spec["added_tokens"]}:
            spec["added_tokens"].append(_added_token(known[text], text, True))
        specials = {**self._specials, "mask_token": text}
        return Tokenizer(spec, specials, self._templates, known[text], self._extra_specials)

    @property
    def vocab_size(self) -> int:
        """Highest id + 1, added tokens and the mask token included."""
        return max(self._ids, default=-1) + 1

    def token_ids(self) -> frozenset[int]:
        """All ids that have a token, the mask's included; a model's other rows must not be drafted."""
        return self._ids

    def token_to_id(self, token: str) -> int | None:
        return self.mask_token_id if token == self.mask_token else self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (byte-level tokenizers: not yet text)."""
        return self.mask_token if token_id == self.mask_token_id else self._tokenizer.id_to_token(token_id)

    @property
    def mask_token(self) -> str | None:
        """Text of the mask token; None when there is none, or when the mask's id has no token."""
        return self._specials.get("mask_token")

    @property
    def bos_token(self) -> str | None:
        return self._specials.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._specials.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._specials.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self._specials.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.token_to_id(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self.token_to_id(self.pad_token)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json (chat template inside) into an existing folder."""
        folder = Path(folder)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings |= self._template_specials
        if set(self._templates) == {"default"}:
            settings["chat_template"] = self._templates["default"]
        elif self._templates:
            settings["chat_template"] = [{"name": n, "template": t} for n, t in self._templates.items()]
        (folder / "tokenizer.json").write_text(self._json, encoding="utf-8")
        text = json.dumps(settings, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


# --- reading the files


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").exists() or (folder / "vocab.json").exists()


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _spec_path(folder: Path) -> Path:
    """The file that says what a folder's tokenizer is."""
    path = folder / "tokenizer.json"
    return path if path.exists() else folder / "vocab.json"


def _is_id(value: Any) -> bool:
    """Whether this is a number that a token can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, over the older special_tokens_map.json."""
    settings: dict[str, Any] = {}
    for path in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        found = _optional_json(path)
        for name in SPECIAL_NAMES:
            if found.get(name) is not None and _text(found[name]) is None:
                raise UserError(f"{path}: {name} must be a text, got {found[name]!r:.40}")
        for name in ("additional_special_tokens", "extra_special_tokens"):
            if not isinstance(found.get(name), list | dict | None):
                raise UserError(f"{path}: {name} must be a list of texts, got {found[name]!r:.40}")
        settings |= found
    return settings


def _text(value: Any) -> str | None:
    """A special token is written as a string, or as an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _named_specials(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _text(settings.get(name)) for name in SPECIAL_NAMES}
    return {name: text for name, text in named.items() if text is not None}


def _extra_specials(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Special tokens without a name of their own, in the old field or the new one."""
    values = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    values = values.values() if isinstance(values, dict) else values
    return tuple(text for text in map(_text, values) if text is not None)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; chat_template.jinja wins over tokenizer_config.json."""
    value = settings.get("chat_template")
    if (path := folder / "chat_template.jinja").exists():
        try:
            value = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot be read ({one_line(error)})") from None
    if isinstance(value, str):
        return {"default": value}
    try:
        named = {entry["name"]: entry["template"] for entry in value or []}
        if all(isinstance(text, str) for text in (*named, *named.values())):
            return named
    except (TypeError, KeyError):
        pass
    raise UserError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text or named texts")


def _read_spec(folder: Path) -> Spec:
    """The folder's tokenizer.json, or what it would be; with the added tokens that only other files name."""
    settings, path = _settings(folder), _spec_path(folder)
    spec = read_json(path) if path.name == "tokenizer.json" else _spec_from_vocabulary(folder, settings)
    if fault := _fault(spec):
        raise UserError(f"{path}: not a tokenizer that can be read ({fault})")
    added = list(spec.get("added_tokens") or [])
    texts, numbers = {token["content"] for token in added}, {token["id"] for token in added}
    for token in _named_elsewhere(folder, settings, _vocabulary(spec)):
        if token["content"] not in texts and token["id"] not in numbers:
            added.append(token)
    return {**spec, "added_tokens": sorted(added, key=lambda token: token["id"])}


def _fault(spec: Spec) -> str | None:
    """What is wrong with the parts that are worked on here; the `tokenizers` library looks at the others."""
    model, added = spec.get("model"), spec.get("added_tokens") or []
    if not isinstance(model, dict) or "vocab" not in model:
        return "no model with a vocabulary"
    vocab, merges = model["vocab"], model.get("merges") or []
    scored = isinstance(vocab, list) and all(isinstance(e, list) and e and isinstance(e[0], str) for e in vocab)
    if not scored and not (isinstance(vocab, dict) and all(map(_is_id, vocab.values()))):
        return "model.vocab must give each text its id"
    if not isinstance(merges, list) or not all(map(_is_merge, merges)):
        return "model.merges must be a list of pairs"
    if not isinstance(model.get("unk_token"), str | None):
        return "model.unk_token must be a text"
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and _is_id(token.get("id")) for token in added
    ):
        return "added_tokens must be a list of objects with id and content"
    return None


def _is_merge(merge: Any) -> bool:
    pair = merge.split(" ", 1) if isinstance(merge, str) else merge
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)


def _added_token(token_id: int, content: str, special: bool, flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    if not _is_id(token_id) or not isinstance(content, str):
        raise ValueError(f"{content!r:.40} with id {token_id!r:.40}")
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return {"id": token_id, "content": content, "special": special, **{n: bool((flags or {}).get(n)) for n in names}}


def _named_elsewhere(folder: Path, settings: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[dict[str, Any]]:
    """Added tokens of tokenizer_config.json and added_tokens.json, and special tokens of the base vocabulary."""
    specials = [*_named_specials(settings).values(), *_extra_specials(settings)]
    path = folder / "tokenizer_config.json"
    try:
        found = [
            _added_token(int(i), flags["content"], bool(flags.get("special")), flags)
            for i, flags in (settings.get("added_tokens_decoder") or {}).items()
        ]
        path = folder / "added_tokens.json"
        found += [_added_token(i, text, text in specials) for text, i in _optional_json(path).items()]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: added tokens are not readable ({one_line(error)})") from None
    found += [_added_token(vocabulary[text], text, True) for text in specials if text in vocabulary]
    return list({token["content"]: token for token in reversed(found)}.values())


def _spec_from_vocabulary(folder: Path, settings: Mapping[str, Any]) -> Spec:
    """A byte-level byte-pair tokenizer from vocab.json and merges.txt; cut as Qwen2 cuts, or as GPT-2 does."""
    kind = settings.get("tokenizer_class") or _optional_json(folder / "config.json").get("model_type") or ""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    normalizer, cutter = None, {**byte_level, "use_regex": True}
    if str(kind).lower().startswith(("qwen2", "qwen3")):
        normalizer = {"type": "NFC"}
        split = {"type": "Split", "pattern": {"Regex": QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
        cutter = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "vocab": read_json(folder / "vocab.json"),
        "merges": _merges(folder / "merges.txt"),
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": cutter, "post_processor": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False}, "model": model,
    }  # fmt: skip


def _merges(path: Path) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from None
    pairs = [line.rstrip("\r").split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise UserError(f"{path}: every line must hold two tokens")
    return pairs


# --- working on a tokenizer.json


def _vocabulary(spec: Spec) -> dict[str, int]:
    """The base vocabulary: an object in most models, a list of (text, score) in Unigram."""
    vocab = spec["model"]["vocab"]
    return dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}


def _ids(spec: Spec) -> dict[str, int]:
    return {**_vocabulary(spec), **{token["content"]: token["id"] for token in spec.get("added_tokens") or []}}


def _pinned(spec: Spec) -> Spec:
    """A copy that asks for no cutting or padding and whose added tokens stand in the base vocabulary with their ids.

    The library ignores the `id` of an added token that the base vocabulary lacks and numbers it after the last one:
    a hole (the published checkpoint: id 151669), or a token taken out, would shift all later ids. Unigram cannot have holes.
    """
    model = dict(spec["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = _ids(spec)
    return {**spec, "truncation": None, "padding": None, "model": model}


def _without(spec: Spec, token_id: int, source: str) -> Spec:
    """A copy in which no token has `token_id`: not an added one, nor one of the base vocabulary, nor a merge."""
    model = dict(spec["model"])
    texts = {text for text, i in _ids(spec).items() if i == token_id}
    if model.get("unk_token") in texts or model.get("unk_id") == token_id:
        raise UserError(f"{source}: the mask token {min(texts)!r} must not also be the unknown token")
    if not isinstance(model["vocab"], dict):
        return _renamed(spec, token_id)
    model["vocab"] = {text: i for text, i in model["vocab"].items() if i != token_id}
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, texts)]
    return {**spec, "model": model, "added_tokens": [t for t in spec["added_tokens"] if t["id"] != token_id]}


def _touches(merge: str | list[str], texts: set[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in texts or right in texts or left + right in texts


def _renamed(spec: Spec, token_id: int) -> Spec:
    """Unigram numbers its tokens by place, so the token keeps its place under a text that nobody can guess."""
    secret = f"\0{secrets.token_hex(16)}"
    vocab = [[secret, -1e6] if i == token_id else entry for i, entry in enumerate(spec["model"]["vocab"])]
    added = [{**t, "content": secret} if t["id"] == token_id else t for t in spec["added_tokens"]]
    return {**spec, "model": {**spec["model"], "vocab": vocab}, "added_tokens": added}


def _build(spec: Spec, source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{source}: not a tokenizer that can be read ({one_line(error)})") from None


# --- chat templates


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As Hugging Face's: no HTML escapes, unlike jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """Templates come with models from strangers: they run in a sandbox."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)
