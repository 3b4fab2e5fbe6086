"""A row's float32 result is the same bits, whatever stands beside and behind it; and packed layers equal plain ones."""

from __future__ import annotations

import pytest
import torch

from refusion.methods.base import Forward
from refusion.models.prepack import PackedLinear, can_prepack, prepack
from refusion.models.runner import Runner, barred_ids
from refusion.models.transformer import ModelConfig, Transformer

SHAPES = {
    "nano": ModelConfig("qwen3", 97, 256, 704, 2, 8, 4, 32, qk_norm=True),
    "recorded": ModelConfig("qwen3", 89, 192, 512, 2, 6, 2, 32, qk_norm=True, tie_word_embeddings=False),
    "smollm2": ModelConfig("llama", 120, 576, 1536, 1, 9, 3, 64),
    "wide heads": ModelConfig("qwen2", 64, 256, 320, 2, 4, 2, 128, qkv_bias=True),
}


def transformer(shape: str, packed: bool = True) -> Transformer:
    model = Transformer(SHAPES[shape]).initialize(torch.Generator().manual_seed(1)).eval()
    for parameter in model.parameters():  # large enough weights that the rows differ
        if parameter.dim() > 1:
            parameter.data *= 4
    if packed:
        prepack(model)
    return model


def answers(
    model: Transformer, context: list[int], tokens: list[int], asked: int
) -> tuple[list[float], tuple[int, ...]]:
    """Probabilities at the first `asked` rows of a second forward, after a cached context."""
    vocab = model.config.vocab_size
    runner = Runner(model, barred_ids(vocab, range(vocab), 0), 16)
    runner(Forward(tuple(context), tuple(range(len(context))), (0,) * len(context)))
    positions = tuple(range(len(context), len(context) + len(tokens)))
    drafts = tuple(range(asked))
    keep = tuple(range(len(context)))
    answer = runner(Forward(tuple(tokens), positions, (0,) * len(tokens), drafts, keep=keep))
    return list(answer.probabilities), answer.tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_rows_behind_them(shape: str) -> None:
    model = transformer(shape)
    if not can_prepack(Transformer(SHAPES[shape])):
        pytest.skip("this build of torch has no oneDNN")
    generator = torch.Generator().manual_seed(2)
    for trial in range(12):
        length = int(torch.randint(1, 150, (1,), generator=generator))
        ids = torch.randint(1, SHAPES[shape].vocab_size, (length + 70,), generator=generator).tolist()
        context, tokens = ids[:length], ids[length:]
        long = answers(model, context, tokens, 30)
        for rows in (1, 2, 3, 5, 8, 17, 30):
            short = answers(model, context, tokens[:rows], rows)
            assert short[0] == long[0][:rows], (trial, length, rows)
            assert short[1] == long[1][:rows]


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_equals_plain(shape: str) -> None:
    tokens, positions = torch.tensor([[5, 9, 3, 22, 7]]), torch.tensor([[0, 1, 7, 8, 2]])
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    plain, packed = transformer(shape, packed=False), transformer(shape)
    assert isinstance(packed.lm_head, PackedLinear)
    with torch.inference_mode():
        expected = plain.logits(plain(tokens, positions, mask))
        got = packed.logits(packed(tokens, positions, mask))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


def test_bfloat16_packs_too() -> None:
    model = Transformer(SHAPES["nano"]).initialize(torch.Generator().manual_seed(0)).eval().to(torch.bfloat16)
    if not can_prepack(model):
        pytest.skip("no bfloat16 in this build's oneDNN or on this processor")
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    plain = model.lm_head(x)
    prepack(model)
    torch.testing.assert_close(model.lm_head(x), plain, atol=2e-2, rtol=2e-2)
