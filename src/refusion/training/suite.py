"""The procedural suite as training data: its tokenizer and its rows, made once and kept in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from refusion.config import UserError
from refusion.evaluation import procedural
from refusion.evaluation.procedural import FAMILIES, Item
from refusion.models.tokenizer import Tokenizer
from refusion.training import vocabulary
from refusion.training.data import RowStore, cached_store

__all__ = ["FAMILIES", "learn_tokenizer", "rows"]

VERSION = 2  # of the generators; a change of the tasks must change it, so that no stale rows are read


def learn_tokenizer(size: int, seed: int, per_family: int = 10_000) -> Tokenizer:
    """A vocabulary of `size` entries, learnt on the first `per_family` tasks of each family's training split only."""
    items = chain.from_iterable(procedural.take(family, "train", per_family, seed) for family in FAMILIES)
    texts = chain.from_iterable((item.prompt, item.answer) for item in items)
    roles = ["user\n", "assistant\n", "system\n"] * 200  # so that the template's words are tokens
    return Tokenizer.from_tokenizers(
        vocabulary.learn(chain(texts, roles), size), chat_template=vocabulary.CHATML, mask_token=vocabulary.MASK,
        eos_token=vocabulary.END, pad_token=vocabulary.PAD, bos_token=None,
    )  # fmt: skip


def encode(tokenizer: Tokenizer, item: Item) -> tuple[list[int], list[int]]:
    """Prompt in the chat template, and answer with end-of-sequence."""
    assert tokenizer.eos_token_id is not None
    prompt = tokenizer.encode_chat([{"role": "user", "content": item.prompt}])
    return prompt, [*tokenizer.encode(item.answer), tokenizer.eos_token_id]


def rows(
    tokenizer: Tokenizer, split: str, per_family: int, seed: int, context: int, cache: Path,
    weights: Sequence[float] | None = None,
) -> tuple[RowStore, int]:  # fmt: skip
    """`per_family` rows of every family, times its weight, from `cache` if they were made before; and how many of them
    were dropped because they are longer than `context` tokens. Raises `UserError` when nothing is left."""
    weights = weights or [1] * len(FAMILIES)
    counts = [round(per_family * weight) for weight in weights]
    if len(weights) != len(FAMILIES) or sum(counts) < 1:
        raise UserError(f"data.family_weights must have {len(FAMILIES)} entries ({', '.join(FAMILIES)}), and not all of them 0")

    def encoded() -> Iterator[tuple[list[int], list[int]]]:
        for family, count in zip(FAMILIES, counts, strict=True):
            for item in procedural.take(family, split, count, seed):
                yield encode(tokenizer, item)

    sample = tokenizer.encode("the quick brown fox 0123 def f(xs): return")
    fingerprint = [VERSION, split, counts, seed, tokenizer.vocab_size, sample, tokenizer.chat_template]
    store = cached_store(cache / f"{split}.npz", fingerprint, lambda: RowStore.build(encoded()))
    kept = store.within(context)
    if len(kept) == 0:
        raise UserError(f"every row of the suite's {split} split is longer than the model's context of {context} tokens")
    return kept, len(store) - len(kept)
