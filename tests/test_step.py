"""The hybrid loss: equal to a slow reference, and indifferent to how a batch is cut, padded or ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from refusion.methods.autoregressive import AutoregressiveObjective
from refusion.methods.base import Loss, TokenIds, TrainingRow
from refusion.methods.masked import MaskedObjective
from refusion.methods.refusion.corrupt import AR, MDM, ReFusionObjective
from refusion.models.transformer import ModelConfig, Transformer
from refusion.training import step
from refusion.training.data import Batch, Batches, RowStore, collate, packed, question
from refusion.training.step import accumulate, evaluate, visible

MASK, EOS, VOCAB = 3, 2, 43
IDS = TokenIds(MASK, (EOS,))
CONFIG = ModelConfig("qwen3", VOCAB, 24, 32, 2, 4, 2, 8, qk_norm=True)
HELPS: dict[str, Any] = {"autoregressive_fraction": 0.25, "partial_slot_fraction": 0.3, "eos_fill": True}


def fresh() -> Transformer:
    """Every weight random, and large enough that a mistake shows."""
    model, generator = Transformer(CONFIG).train(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
    return model


def made(objective: Any, count: int = 12, seed: int = 0) -> list[TrainingRow]:
    rng = np.random.default_rng(seed)
    pairs = [
        (rng.integers(4, VOCAB, rng.integers(1, 9)).tolist(), [*rng.integers(4, VOCAB, rng.integers(5, 24)).tolist(), EOS])
        for _ in range(count)
    ]
    return list(Batches(RowStore.build(pairs), objective, count, seed, infill_fraction=0.2).rows(0))


def cut(rows: Sequence[TrainingRow], size: int, losses: int = 2) -> list[Batch]:
    return [collate(list(rows[i : i + size]), losses) for i in range(0, len(rows), size)]


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def compare(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys() and one
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=1e-4, atol=tolerance), name


# --- the slow reference


def outputs(model: Transformer, row: TrainingRow) -> Tensor:
    """Logits of every token of a row, each computed from the tokens that stand up to it in the buffer, and nothing else."""
    tokens, positions = torch.from_numpy(row.tokens)[None], torch.from_numpy(row.positions)[None]
    last = [model(tokens[:, : i + 1], positions[:, : i + 1])[:, -1] for i in range(len(row.tokens))]
    return model.logits(torch.cat(last))


def slow(model: Transformer, rows: Sequence[TrainingRow], objective: ReFusionObjective, lengths: Sequence[float]) -> Tensor:
    """METHOD 3.5, token by token. lengths: p * response length of each row, for the upstream normalisation."""
    ar, mdm, upstream = [], [], []
    for row, length in zip(rows, lengths, strict=True):
        logits, in_row = outputs(model, row), []
        for i, target in enumerate(row.targets):
            if target < 0:
                continue
            entropy = torch.logsumexp(logits[i], 0) - logits[i, target]
            (in_row if row.tokens[i] == MASK else ar).append(entropy)
        mdm += in_row
        upstream.append(sum(in_row) / length if in_row else torch.zeros(()))
    zero = torch.zeros(())
    l_ar = sum(ar) / len(ar) if ar else zero
    l_mdm = (sum(mdm) / len(mdm) if mdm else zero) if objective.normalisation == "targets" else sum(upstream) / len(rows)
    total: Tensor = l_ar + objective.mdm_scale * l_mdm
    return total


@pytest.mark.parametrize("normalisation", ["targets", "upstream"])
@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("helps", [{}, HELPS], ids=["plain", "helps"])
def test_equal_to_a_slow_reference(normalisation: str, scale: float, helps: dict[str, Any]) -> None:
    objective = ReFusionObjective(
        IDS, (2, 4, 8), corruption="bernoulli", normalisation=normalisation, mdm_scale=scale, **helps
    )  # fmt: skip
    model, rows = fresh(), made(objective, 7)
    masked = [row.tokens == MASK for row in rows]
    lengths = [float(1 / row.weights[m][0]) if m.any() else 1.0 for row, m in zip(rows, masked, strict=True)]
    report = accumulate(model, cut(rows, 5), objective.losses)
    ours = gradients(model)
    expected = slow(model, rows, objective, lengths)
    expected.backward()  # type: ignore[no-untyped-call]
    compare(gradients(model), ours)
    assert report["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert report["loss"] == pytest.approx(report["loss_ar"] + scale * report["loss_mdm"], rel=1e-6)


def test_by_hand() -> None:
    """Uniform outputs: every cross-entropy is ln V, so a mean is ln V, and upstream's is ln V * masked / (p * length)."""
    model = fresh()
    with torch.no_grad():
        model.model.norm.weight.zero_()
    rows = [_row([5, 6], [7, 8], AR, 1.0), _row([5, MASK, MASK, MASK], [-1, 9, 10, 11], MDM, 0.25)]
    for per, mdm in (("targets", 0.25), ("rows", 0.375)):  # three targets of weight 1/4, over 3 targets or 2 rows
        report = accumulate(model, [collate(rows, 2)], [Loss("ar"), Loss("mdm", 2.0, per)])
        assert report["loss_ar"] == pytest.approx(np.log(VOCAB), rel=1e-6)
        assert report["loss_mdm"] == pytest.approx(np.log(VOCAB) * mdm, rel=1e-6)
        assert report["loss"] == pytest.approx(np.log(VOCAB) * (1 + 2 * mdm), rel=1e-6)


def _row(tokens: list[int], targets: list[int], loss: int, weight: float) -> TrainingRow:
    n, zeros = len(tokens), np.zeros(len(tokens), dtype=np.int64)
    return TrainingRow(
        np.array(tokens), np.arange(n), np.array(targets), np.full(n, loss), np.full(n, weight, dtype=np.float32), zeros, zeros
    )


# --- cutting, padding, order


OBJECTIVES: dict[str, Any] = {
    "refusion": ReFusionObjective(IDS, (2, 4, 8), **HELPS),
    "upstream": ReFusionObjective(IDS, (2, 4, 8), corruption="bernoulli", normalisation="upstream", mdm_scale=0.7),
    "unrolled": ReFusionObjective(IDS, (2, 4, 8), unrolled_fraction=0.7, first_token_weight=3.0, **HELPS),
    "autoregressive": AutoregressiveObjective(prompt_loss=True),
    "llada": MaskedObjective(IDS, 20),
    "dream": MaskedObjective(IDS, 20, shifted=True, context_p=0.3),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("size", [1, 5, 7, 11])
def test_micro_batches_of_any_size_give_the_loss_and_gradients_of_the_whole(name: str, size: int) -> None:
    objective = OBJECTIVES[name]
    model, rows, losses = fresh(), made(objective), objective.losses
    whole = accumulate(model, cut(rows, 12, len(losses)), losses)
    expected = gradients(model)
    parts = accumulate(model, cut(rows, size, len(losses)), losses)
    compare(gradients(model), expected)
    assert parts == pytest.approx(whole, rel=1e-6, abs=1e-7) and all(value > 0 for value in whole.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_order_of_rows_and_padding_change_nothing(name: str) -> None:
    objective = OBJECTIVES[name]
    model, rows, losses = fresh(), made(objective), objective.losses
    whole = accumulate(model, cut(rows, 12, len(losses)), losses)
    expected = gradients(model)
    mixed = [rows[i] for i in np.random.default_rng(0).permutation(12)]
    assert accumulate(model, cut(mixed, 12, len(losses)), losses) == pytest.approx(whole, rel=1e-6)
    compare(gradients(model), expected)
    batch = cut(rows, 12, len(losses))[0]

    def wider(array: Any, value: float) -> Any:
        return np.pad(array, ((0, 0), (0, 9)), constant_values=value)

    padded = Batch(
        wider(batch.tokens, -1), wider(batch.positions, 77), wider(batch.targets, -1), wider(batch.losses, 1),
        wider(batch.weights, 5.0), batch.counts, wider(batch.segments, -1), wider(batch.prefixes, 0),
        wider(batch.bidirectional, False), wider(batch.documents, -1), batch.rows,
    )  # fmt: skip
    assert accumulate(model, [padded], losses) == pytest.approx(whole, rel=1e-6)
    compare(gradients(model), expected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_to_a_multiple_changes_no_loss_and_no_gradient(name: str) -> None:
    model, rows, losses = fresh(), made(OBJECTIVES[name]), OBJECTIVES[name].losses
    whole, padded = collate(rows, len(losses)), collate(rows, len(losses), 64)
    assert padded.tokens.shape[1] % 64 == 0 and padded.tokens.shape[1] > whole.tokens.shape[1]
    reports, grads = [], []
    for batch in (whole, padded):
        reports.append(accumulate(model, [batch], losses))
        grads.append(gradients(model))
    assert reports[0] == pytest.approx(reports[1], rel=1e-5)
    compare(*grads)


def test_twice_the_same_batch_is_the_same_loss_and_gradient() -> None:
    """Normalised over the global batch: not its size, but its content counts."""
    objective = OBJECTIVES["upstream"]
    model, rows = fresh(), made(objective)
    one = accumulate(model, cut(rows, 12), objective.losses)
    expected = gradients(model)
    assert accumulate(model, cut([*rows, *rows], 8), objective.losses) == pytest.approx(one, rel=1e-6)
    compare(gradients(model), expected)


# --- nothing to count


@pytest.mark.parametrize("missing", ["ar", "mdm", "both"])
@pytest.mark.parametrize("normalisation", ["targets", "upstream"])
def test_a_batch_without_any_target_of_a_loss_is_finite_and_its_loss_zero(missing: str, normalisation: str) -> None:
    objective = ReFusionObjective(IDS, (4,), normalisation=normalisation)
    rows = made(objective, 8)
    for row in rows:
        drop = {"ar": row.tokens != MASK, "mdm": row.tokens == MASK, "both": row.tokens >= 0}[missing]
        row.targets[drop] = -1
    for size in (8, 3):
        model = fresh()
        report = accumulate(model, cut(rows, size), objective.losses)
        found = gradients(model)
        assert all(np.isfinite(value) for value in report.values())
        assert all(torch.isfinite(gradient).all() for gradient in found.values())
        for name in ("ar", "mdm"):
            assert (report[f"loss_{name}"] == 0.0) == (missing in (name, "both"))
        assert (sum(float(g.abs().sum()) for g in found.values()) == 0) == (missing == "both")


def test_batches_of_the_pipeline_without_clean_or_masked_slots_are_finite() -> None:
    """TRAPS 13: for an answer of one slot, "count" never masks (t < 1), and the other extreme is bernoulli at p near 1."""
    model = fresh()
    for kind, wanted in (("count", 0), ("bernoulli", 1)):
        objective = ReFusionObjective(IDS, (64,), corruption=kind)
        of = question(np.array([5, 6]), np.array([7, 8, EOS]))
        rows = [objective.row(of, np.random.default_rng(i)) for i in range(40)]
        alike = [row for row in rows if bool((row.tokens == MASK).any()) == bool(wanted)]
        report = accumulate(model, [collate(alike, 2)], objective.losses)
        assert report["loss"] > 0 and report[("loss_mdm", "loss_ar")[wanted]] == 0.0


# --- validation


@pytest.mark.parametrize("size", [1, 5, 12])
def test_validation_is_the_same_loss_without_gradients(size: int) -> None:
    objective = OBJECTIVES["refusion"]
    model, rows = fresh(), made(objective)
    expected = accumulate(model, cut(rows, 12), objective.losses)
    gradients(model)
    found = evaluate(model, cut(rows, size), objective.losses)
    assert found == pytest.approx({k: v for k, v in expected.items() if k != "loss"}, rel=1e-5)
    assert not gradients(model)


def test_autocast_is_near() -> None:
    objective = OBJECTIVES["refusion"]
    model, rows = fresh(), made(objective)
    exact = accumulate(model, cut(rows, 12), objective.losses)
    assert accumulate(model, cut(rows, 12), objective.losses, autocast=True) == pytest.approx(exact, rel=0.02)
    assert all(gradient.dtype == torch.float32 for gradient in gradients(model).values())


# --- who sees whom


@torch.no_grad()
def test_a_reordered_row_in_a_batch_is_what_its_prefixes_say() -> None:
    """The whole padded batch in one forward == every token from its own buffer prefix alone (TRAPS 1)."""
    model = fresh()
    rows = made(OBJECTIVES["refusion"])
    batch = collate(rows, 2)
    assert any((np.diff(row.positions) < 0).any() for row in rows)
    tokens, positions = torch.from_numpy(batch.tokens).clamp(min=0), torch.from_numpy(batch.positions)
    width = tokens.shape[1]
    for train in (True, False):
        hidden = model.train(train)(tokens, positions, torch.ones(width, width, dtype=torch.bool).tril()[None, None])
        logits = model.logits(hidden)
        for i, row in enumerate(rows):
            assert torch.allclose(logits[i, : len(row.tokens)], outputs(model, row), atol=1e-5)


@torch.no_grad()
def test_masked_slots_see_clean_slots_that_come_later_in_the_text() -> None:
    row = TrainingRow(
        np.array([5, 20, 21, MASK, MASK]), np.array([0, 3, 4, 1, 2]), np.array([-1, 21, -1, 9, 9]), np.array([0, 0, 0, 1, 1]),
        np.ones(5, dtype=np.float32), np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64),
    )  # fmt: skip
    model = fresh()
    other = replace(row, tokens=np.array([5, 20, 22, MASK, MASK]))
    differs = (outputs(model, row) - outputs(model, other)).abs().amax(-1) > 1e-4
    assert differs.tolist() == [False, False, True, True, True]


@torch.no_grad()
def test_every_segment_of_an_unrolled_row_is_a_row_of_its_own() -> None:
    """What a masked slot's outputs are in an unrolled row, they are in an ordinary row of prefix and this slot alone."""
    objective = ReFusionObjective(IDS, (2, 4, 8), unrolled_fraction=1.0, partial_slot_fraction=0.4, eos_fill=True)
    model, seen = fresh(), 0
    rows = made(objective)
    batch = collate(rows, 2)
    tokens, positions = torch.from_numpy(batch.tokens).clamp(min=0), torch.from_numpy(batch.positions)
    logits = model.logits(model(tokens, positions, visible(batch)))
    for number, row in enumerate(rows):
        for segment in range(row.segments.max() + 1):
            own = np.flatnonzero(row.segments == segment)
            rest = np.arange(row.prefixes[own[0]] if segment else 0)
            alone = np.concatenate([rest, own])
            line = _row(row.tokens[alone].tolist(), row.targets[alone].tolist(), MDM, 1.0)
            line = replace(line, positions=row.positions[alone])
            assert torch.allclose(logits[number, own], outputs(model, line)[len(rest) :], atol=1e-5)
            seen += segment > 0
    assert seen > 2 * len(rows)


@pytest.mark.parametrize("room", [1, 40, 64, 100, 10_000])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_packing_changes_no_loss_and_no_gradient(name: str, room: int) -> None:
    """Rows of every method, those that see both ways and those of several segments included."""
    model, rows, losses = fresh(), made(OBJECTIVES[name]), OBJECTIVES[name].losses
    whole = accumulate(model, cut(rows, 12, len(losses)), losses)
    expected = gradients(model)
    batch = collate(rows, len(losses), 16, room)
    assert batch.rows == 12 and batch.real_tokens == sum(len(row.tokens) for row in rows)
    assert (len(batch.tokens) == 12) == (room == 1) and (room < 10_000 or len(batch.tokens) == 1)
    assert accumulate(model, [batch], losses) == pytest.approx(whole, rel=1e-5, abs=1e-7)
    compare(gradients(model), expected)
    halves = [collate(rows[i : i + 6], len(losses), 1, room) for i in (0, 6)]
    assert accumulate(model, halves, losses) == pytest.approx(whole, rel=1e-5, abs=1e-7)
    compare(gradients(model), expected)


def test_rows_are_packed_where_they_fit() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 200).tolist()
    sequences = packed(lengths, 64)
    assert sorted(row for members in sequences for row in members) == list(range(200))
    assert all(sum(lengths[row] for row in members) <= 64 for members in sequences)
    assert len(sequences) <= 1.05 * sum(lengths) / 64 + 1
    assert packed([70, 3], 64) == [[0], [1]]


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("frozen", ["", "head", "hidden"])
def test_cross_entropy_in_chunks_is_that_of_all_logits(monkeypatch: pytest.MonkeyPatch, size: int, frozen: str) -> None:
    monkeypatch.setitem(step.CHUNK, "cpu", size * 33)
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(50, 16, generator=generator), torch.randn(33, 16, generator=generator)
    hidden.requires_grad_(frozen != "hidden")
    head.requires_grad_(frozen != "head")
    targets, weights = torch.randint(33, (50,), generator=generator), torch.rand(50, generator=generator)
    entropy = torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="none")
    (3 * (entropy * weights).sum()).backward()
    expected = [hidden.grad, head.grad]
    hidden.grad = head.grad = None
    total, found = step._CrossEntropy.apply(hidden, head, targets, weights, torch.float32)
    assert not found.requires_grad
    torch.testing.assert_close(found, entropy.detach(), rtol=1e-5, atol=1e-5)
    (3 * total).backward()
    for grad, true in zip((hidden.grad, head.grad), expected, strict=True):
        assert (grad is None) == (true is None)
        if grad is not None:
            torch.testing.assert_close(grad, true, rtol=1e-5, atol=1e-5)


def test_all_logits_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that a step makes does not grow with the rows times the vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    monkeypatch.setitem(step.CHUNK, "cpu", 8 * 5000)
    head, most = torch.randn(5000, 4, requires_grad=True), []
    for rows in (100, 1000):
        with Largest() as largest:
            targets, weights = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
            hidden = torch.randn(rows, 4, requires_grad=True)
            step._CrossEntropy.apply(hidden, head, targets, weights, torch.float32)[0].backward()
        most.append(largest.elements)
    assert most == [8 * 5000] * 2
