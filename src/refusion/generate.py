"""One prompt, one model: `load`, `Model.generate`, `Model.stream`.

Contract: a `Result` is a fold over a decoder's events; what is decoded depends on prompt, settings and weights alone.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, overload

import torch

from refusion.config import GenerationConfig, UserError, nearest
from refusion.events import Committed, Event, Finished, to_dict
from refusion.methods.base import Answer, Decoder, Forward, TokenIds
from refusion.methods.registry import METHODS, method_of
from refusion.models.checkpoint import FolderConfig, load_model, read_config, resolve_folder
from refusion.models.prepack import prepack
from refusion.models.runner import Runner, barred_ids
from refusion.models.tokenizer import Tokenizer
from refusion.models.transformer import Transformer

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
Config = GenerationConfig  # one of the methods' own
Steps = Generator[Forward | Event, Answer | None, "Result"]  # a request: what is to be computed, and what happens


@dataclass(frozen=True)
class Stats:
    """Figures of one generation. Tokens after the end never count; every model call counts."""

    prompt_tokens: int
    tokens: int  # response tokens, +1 for an end-of-sequence that ended it
    forwards: int  # model calls in which this request had rows
    rows: int  # all input rows of these calls, the prompt's included
    rounds: int
    seconds: float  # wall clock, prompt included

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self), "tokens_per_forward": self.tokens_per_forward, "tokens_per_second": self.tokens_per_second,
        }  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A finished response."""

    text: str
    token_ids: list[int]  # without end-of-sequence, cut before a stop string
    finish_reason: str  # "stop" (end-of-sequence or stop string) or "length"
    events: tuple[Event, ...] = field(repr=False)
    stats: Stats
    settings: dict[str, Any]
    prompt_ids: tuple[int, ...] = field(repr=False)

    def to_dict(self, events: bool = False) -> dict[str, Any]:
        """Plain JSON values."""
        out = {
            "text": self.text, "token_ids": self.token_ids, "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(), "settings": self.settings, "prompt_ids": list(self.prompt_ids),
        }  # fmt: skip
        return out | ({"events": [to_dict(event) for event in self.events]} if events else {})


@dataclass(frozen=True)
class Likelihood:
    """Of a given answer."""

    log_probability: float  # natural logarithm, summed over tokens
    greedy: bool  # every token is the likeliest at its place
    tokens: int


def load(model: str | Path, device: str | None = None, dtype: str | torch.dtype | None = None) -> Model:
    """Load a model: "nano" or "nano-ar" (they come with the package), a Hugging Face folder, or a hub id.

    device: "cpu", "cuda", ...; default: CUDA if there is one. dtype: "float32", "bfloat16" or a torch dtype; default:
    float32 on a CPU, the stored type elsewhere. Raises `UserError` when the folder is missing or broken.
    """
    folder = resolve_folder(model)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = read_config(folder)
    check_defaults(config, folder)
    transformer = load_model(folder, device, dtype)
    prepack(transformer)
    return Model(str(model), transformer, Tokenizer.from_folder(folder), config)


def check_defaults(config: FolderConfig, folder: Path) -> None:
    """A folder's own decoding settings are checked when it is loaded, so that the complaint names the file."""
    method = METHODS.get(str(config.defaults.get("method", "refusion")))
    known = {f.name for m in METHODS.values() for f in fields(m.config)} | {"method"}
    where = f"{folder / 'generation_config.json'}: refusion"
    for key in config.defaults:
        if key not in known:
            raise UserError(f"{where}: unknown setting {key!r}{nearest(key, known)}")
    if method is None:
        raise UserError(f"{where}: method must be one of {', '.join(METHODS)}, got {config.defaults['method']!r}")
    try:
        method.config().resolve(config.defaults)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


class Model:
    """A transformer with its tokenizer and settings, ready to write."""

    def __init__(self, name: str, transformer: Transformer, tokenizer: Tokenizer, folder: FolderConfig) -> None:
        self.name, self.transformer, self.tokenizer, self.folder = name, transformer, tokenizer, folder
        self.ids = TokenIds(folder.mask_token_id, folder.eos_token_ids)
        vocab_size = transformer.config.vocab_size
        self._barred = barred_ids(vocab_size, tokenizer.token_ids(), self.ids.mask).to(
            transformer.lm_head.weight.device
        )

    @property
    def has_mask(self) -> bool:
        """Whether slots can be decoded: an autoregressive folder has no mask token."""
        return self.ids.mask is not None

    @property
    def method(self) -> str:
        """The method that it was trained for, as its folder says; without a mask token it writes token by token."""
        return str(self.folder.defaults.get("method", "refusion")) if self.has_mask else "autoregressive"

    @property
    def by_token(self) -> bool:
        """Whether it has learnt to predict the next token, so that it can write token by token too."""
        return METHODS[self.method].by_token

    def __repr__(self) -> str:
        weight = self.transformer.lm_head.weight
        return f"Model({self.name!r}, {self.folder.parameters:,} parameters, {weight.dtype}, {weight.device})"

    @overload
    def generate(self, prompt: str, config: Config | None = None, raw: bool = False) -> Result: ...
    @overload
    def generate(
        self, prompt: list[str], config: Config | None = None, raw: bool = False, batch_size: int = 16
    ) -> list[Result]: ...
    @overload
    def generate(self, prompt: Any, config: Config | None = None, raw: bool = False, batch_size: int = 16) -> Any: ...
    def generate(self, prompt: Any, config: Config | None = None, raw: bool = False, batch_size: int = 16) -> Any:
        """Write a response; for a list of prompts, a list of responses.

        prompt: text (one user turn if the model has a chat template), a list of {"role", "content"}, or token ids,
        taken verbatim; a list of these is several prompts. raw: no chat template. config: settings; unset ones come
        from the model's generation_config.json. batch_size: how many prompts are answered at once (`refusion.engine`).
        Raises `UserError` for what cannot be done.
        """
        if _several(prompt):
            from refusion.engine import answer_all

            return answer_all(self, prompt, config, raw, batch_size)
        stream = self.stream(prompt, config, raw)
        while True:
            try:
                next(stream)
            except StopIteration as stop:
                return stop.value

    def stream(self, prompt: Prompt, config: Config | None = None, raw: bool = False) -> Generator[Event, None, Result]:
        """The decoder's events as they happen; the generator's return value is the `Result`."""
        return self._run(*self.request(prompt, config, raw))

    def request(self, prompt: Prompt, config: Config | None = None, raw: bool = False) -> tuple[list[int], Config]:
        """What `stream` will do: the prompt's token ids, and settings with nothing unset that fit the context."""
        settings = self.settings(config)
        ids = self.encode(prompt, raw)
        return ids, self._fitted(settings, config, len(ids))

    def likelihood(
        self, prompt: Prompt, answer: str | Sequence[int], config: Config | None = None, raw: bool = False
    ) -> Likelihood:
        """How likely the model is to write `answer` after `prompt`, by its training objective.

        answer: text, or token ids; an end-of-sequence counts only where it stands in the ids. The settings name the method
        and, for slots, their size. Raises `UserError` where there is no answer, no room for it, or no exact likelihood.
        """
        settings = self.settings(config)
        ids = self.encode(prompt, raw)
        tokens = [self._checked(t) for t in (self.tokenizer.encode(answer) if isinstance(answer, str) else answer)]
        compute = method_of(settings).likelihood
        if compute is None:
            raise UserError(f"the method {settings.method} has no exact likelihood")
        if not tokens:
            raise UserError("answer must not be empty")
        if len(ids) + len(tokens) > self.transformer.config.max_position_embeddings:
            raise UserError(f"prompt and answer have {len(ids) + len(tokens)} tokens, longer than the context")
        runner = Runner(self.transformer, self._barred, len(ids) + 2 * len(tokens))
        steps = compute(ids, tokens, settings, self.ids)
        reply = None
        while True:
            try:
                reply = runner(steps.send(reply))  # type: ignore[arg-type]
            except StopIteration as stop:
                log_probability, greedy = stop.value
                return Likelihood(log_probability, greedy, len(tokens))

    def settings(self, config: Config | None = None) -> Config:
        """The settings with nothing unset."""
        defaults = self.folder.defaults
        if config is None:
            config = METHODS[self.method].config()
        if getattr(config, "method", None) not in METHODS:
            known = ", ".join(method.config.__name__ for method in METHODS.values())
            raise UserError(f"config must be one of {known}, got {type(config).__name__}")
        if method_of(config).needs_mask and not self.has_mask:
            raise UserError(
                f"{self.name} has no mask token, so it can only write token by token: use AutoregressiveConfig "
                "(--method autoregressive)"
            )
        return config.resolve(defaults)

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Prompt to token ids, as `generate` does it."""
        if isinstance(prompt, str):
            if not (prompt if raw else prompt.strip()):
                raise UserError("prompt must not be empty")
            _check_text(prompt)
            if raw or not self.tokenizer.has_chat_template:
                ids = self.tokenizer.encode(prompt, add_special_tokens=True)
            else:
                ids = self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        elif len(prompt) and isinstance(prompt[0], Mapping):
            if not self.tokenizer.has_chat_template:
                raise UserError(f"prompt is a list of messages, but {self.name} has no chat template")
            ids = self.tokenizer.encode_chat([_message(m) for m in prompt])
        else:
            return [self._checked(token) for token in prompt] or self._no_prompt()
        ids = [self._checked(token) for token in ids]
        return ids or self._no_prompt()

    @staticmethod
    def _no_prompt() -> NoReturn:
        raise UserError("prompt must not be empty")

    def _checked(self, token: Any) -> int:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise UserError(f"prompt must be text, messages or token ids, got {token!r:.40}")
        plain = int(token)
        if not 0 <= plain < self.transformer.config.vocab_size:
            raise UserError(
                f"prompt has token id {plain!s:.40}, outside the vocabulary of {self.transformer.config.vocab_size}"
            )
        return plain

    def _fitted(self, settings: Config, given: Config | None, prompt_tokens: int) -> Config:
        """Within the context: a budget that was not asked for shrinks to what is left of it."""
        context = self.transformer.config.max_position_embeddings
        room = context - prompt_tokens
        assert settings.max_new_tokens is not None
        if room < 1:
            raise UserError(f"prompt has {prompt_tokens} tokens, longer than the context of {context} leaves room for")
        if settings.max_new_tokens <= room:
            return settings
        if given is not None and given.max_new_tokens is not None:
            raise UserError(
                f"max_new_tokens ({settings.max_new_tokens}) and the prompt ({prompt_tokens} tokens) do not fit the "
                f"context of {context}"
            )
        return replace(settings, max_new_tokens=room)

    def _run(self, prompt: list[int], settings: Config) -> Generator[Event, None, Result]:
        clock = Clock()
        steps, runner = self.begin(prompt, settings, clock)
        answer = None
        while True:
            try:
                item = steps.send(answer)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            answer = None
            if isinstance(item, Forward):
                answer = runner(item)
            else:
                clock.stop()
                yield item  # what the consumer does with it is not our time
                clock.start()

    def begin(self, prompt: list[int], settings: Config, clock: Clock) -> tuple[Steps, Runner]:
        """For who drives: what is to be computed and what happens, step by step, and a runner that can compute it.

        prompt, settings: as from `request`. clock: whoever drives stops it while others have the turn.
        """
        assert settings.max_new_tokens is not None
        runner = Runner(self.transformer, self._barred, len(prompt) + 2 * settings.max_new_tokens)
        return self._steps(prompt, settings, runner, clock), runner

    def _steps(self, prompt: list[int], settings: Config, runner: Runner, clock: Clock) -> Steps:
        decoder = make_decoder(prompt, settings, self.ids)
        fold = _Fold(self.tokenizer, settings.stop or (), () if settings.ignore_eos else self.ids.eos)
        answer = None
        while not fold.stopped:
            item = decoder.send(answer)
            answer = None
            if isinstance(item, Forward):
                answer = yield item
                continue
            fold.add(item)
            if isinstance(item, Finished):
                break
            yield item
        text, finished = fold.close()
        yield finished
        tokens, reason = finished.tokens, finished.reason
        count = len(tokens) + finished.eos
        stats = Stats(len(prompt), count, runner.forwards, runner.rows, fold.rounds, clock.stop())
        return Result(text, list(tokens), reason, tuple(fold.events), stats, settings.to_dict(), tuple(prompt))


def make_decoder(prompt: Sequence[int], settings: Config, ids: TokenIds) -> Decoder:
    """The decoder that these settings ask for."""
    return method_of(settings).decode(prompt, settings, ids)


def _several(prompt: Any) -> bool:
    """Whether this is a list of prompts: of texts, of token lists, or of message lists."""
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise UserError(f"prompt must be text, messages or token ids, got {type(prompt).__name__}")
    first = prompt[0] if len(prompt) else None
    return isinstance(first, str) or (isinstance(first, Sequence) and not isinstance(first, Mapping))


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise UserError(f"prompt message must have 'role' and 'content', got {message!r}")
    for key in ("role", "content"):
        if not isinstance(message[key], str):
            raise UserError(f"prompt message must have text as {key!r}, got {message[key]!r}")
        _check_text(message[key])
    return dict(message)


def _check_text(text: str) -> None:
    """Half a surrogate pair is no text; no tokenizer takes it."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError("prompt is not valid Unicode: it holds half of a surrogate pair")


class Clock:
    """Wall clock that can be stopped; starts running."""

    def __init__(self) -> None:
        self._sum = 0.0
        self.start()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> float:
        """Seconds that it ran altogether."""
        self._sum += time.perf_counter() - self._since
        self._since = time.perf_counter()
        return self._sum


class _Fold:
    """Collects events; looks for stop strings in the text whose every earlier token is final.

    The text ends before a stop string that is there in the shortest run of tokens from the beginning that holds any; so the
    order in which slots were written makes no difference.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], eos: Collection[int]) -> None:
        self.tokenizer, self.stop, self.eos = tokenizer, stop, eos
        self.events: list[Event] = []
        self.rounds = 0
        self._written: dict[int, int] = {}
        self._prefix: list[int] = []
        self._cut: str | None = None  # the text before a stop string
        self._finished: Finished | None = None

    @property
    def stopped(self) -> bool:
        return self._cut is not None

    def add(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._finished = event
            return
        self.events.append(event)
        if isinstance(event, Committed):
            self.rounds = max(self.rounds, event.round + 1)
            if self.stop:
                self._written |= zip(event.positions, event.tokens, strict=True)
                self._extend()

    def _extend(self) -> None:
        while not self.stopped:
            token = self._written.get(len(self._prefix))
            if token is None or token in self.eos:
                return
            self._prefix.append(token)
            text = self.tokenizer.decode(self._prefix)
            places = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
            self._cut = text[: min(places)] if places else None

    def close(self) -> tuple[str, Finished]:
        """The text, and the last event: the decoder's own, or one that ends before a stop string."""
        if self._cut is None:
            assert self._finished is not None
            text, finished = self.tokenizer.decode(self._finished.tokens), self._finished
        else:
            kept = len(self._prefix)  # tokens that lie wholly before the stop string
            while len(self.tokenizer.decode(self._prefix[:kept])) > len(self._cut):
                kept -= 1
            text, finished = self._cut, Finished("stop", tuple(self._prefix[:kept]), False)
        self.events.append(finished)
        return text, finished
