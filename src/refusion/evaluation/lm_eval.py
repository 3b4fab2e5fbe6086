"""`refusion` as a model of lm-eval (extra `[eval]`): its tasks, prompts and scoring, our decoding.

    lm_eval --model refusion --model_args pretrained=nano,method=refusion,slot_size=8 --tasks gsm8k --include_path ...
    (import refusion.evaluation.lm_eval first, or: python -m refusion.evaluation.lm_eval <the same arguments>)

`generate_until` writes by the method's decoder. `loglikelihood` is that of the training objective: `Model.likelihood`.
Contract: requests come and go in lm-eval's order; nothing is cached here. Knows no task.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError("refusion.evaluation.lm_eval needs lm-eval: pip install 'refusion[eval]'") from error

from refusion.config import CONFIGS, GenerationConfig, UserError, nearest
from refusion.generate import Model, load

MOST_TOKENS = 256  # where a task does not say how long an answer may be


@register_model("refusion")
class RefusionLM(LM):  # type: ignore[misc]
    """pretrained: a model as `refusion.load` takes it. method, and any setting of it: as in `refusion generate`."""

    def __init__(
        self, pretrained: str = "nano", method: str | None = None, device: str | None = None, dtype: str | None = None,
        batch_size: Any = None, max_batch_size: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model: Model = load(pretrained, device, dtype)
        kind = CONFIGS.get(method or self.model.method)
        if kind is None:
            raise UserError(f"unknown method {method!r}; there is {', '.join(CONFIGS)}{nearest(str(method), CONFIGS)}")
        known = [f.name for f in fields(kind)]
        for name in settings:
            if name not in known:
                raise UserError(f"unknown setting {name!r}{nearest(name, known)}")
        self.kind, self.given = kind, settings
        self._config(settings)  # a mistake is known before any work

    @property
    def tokenizer_name(self) -> str:
        return self.model.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt as text, special tokens included; it comes back to us as a raw prompt."""
        return self.model.tokenizer.render_chat(chat_history)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._write(*request.args) for request in requests]

    def _write(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(s for s in until if s)
        settings: dict[str, Any] = {"stop": stop, "max_new_tokens": int(options.get("max_gen_toks", MOST_TOKENS))}
        if options.get("do_sample"):
            settings["temperature"] = float(options.get("temperature", 1.0))
        return self.model.generate(context, self._config(settings | self.given), raw=True).text

    def _config(self, settings: dict[str, Any]) -> GenerationConfig:
        return self.kind(**settings)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [self._score(*request.args) for request in requests]

    def _score(self, context: str, continuation: str) -> tuple[float, bool]:
        """A continuation is tokenised together with its context, and cut where the context's own tokens end."""
        encode = self.model.tokenizer.encode
        tail = len(context) - len(context.rstrip())
        if tail:
            continuation, context = context[-tail:] + continuation, context[:-tail]
        first = encode(context) or list(self._beginning())
        whole = encode(context + continuation)
        answer = whole[len(first) :] if context and whole[: len(first)] == first else encode(continuation)
        found = self.model.likelihood(first, answer, self._config(dict(self.given)))
        return found.log_probability, found.greedy

    def _beginning(self) -> tuple[int, ...]:
        """What stands before a text that stands alone."""
        tokenizer = self.model.tokenizer
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        assert token is not None
        return (token,)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return [self._rolling(*request.args) for request in requests]

    def _rolling(self, text: str) -> float:
        """A whole text, in pieces that fit the context; each piece begins anew."""
        tokens, room = self.model.tokenizer.encode(text), self.model.transformer.config.max_position_embeddings - 1
        config = self._config(dict(self.given))
        pieces = [tokens[i : i + room] for i in range(0, len(tokens), room)]
        return sum(self.model.likelihood(list(self._beginning()), piece, config).log_probability for piece in pieces)


def main() -> None:
    """lm-eval's own command line, with this model known."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
