"""The small foundations: slot arithmetic, the cache, and chance."""

from __future__ import annotations

import doctest
import importlib
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion.cache import KeyValueCache
from refusion.sampling import Shaping, draw, draw_rows, uniform
from refusion.slots import Layout


@pytest.mark.parametrize(
    "module",
    [
        "cache", "methods.masked", "methods.refusion.select", "methods.refusion.verify", "methods.rows", "models.layouts",
        "models.runner", "models.transformer", "sampling",
    ],
)
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"refusion.{module}"))
    assert result.attempted > 0 and result.failed == 0


@given(n=st.integers(1, 200), k=st.integers(1, 40), extra=st.integers(0, 100))
def test_layout_covers_every_position_once(n: int, k: int, extra: int) -> None:
    layout = Layout(n, k, k + extra)
    positions = [p for block in range(layout.blocks) for slot in layout.block(block) for p in layout.positions(slot)]
    assert positions == list(range(n))
    assert all(layout.slot_of(p) == slot for slot in range(layout.slots) for p in layout.positions(slot))
    assert all(len(layout.block(block)) == (k + extra) // k for block in range(layout.blocks - 1))


def test_layout_of_the_worked_example() -> None:
    layout = Layout(20, 8, 16)
    assert [list(layout.block(b)) for b in range(layout.blocks)] == [[0, 1], [2]]
    assert list(layout.positions(2)) == [16, 17, 18, 19]


def columns(*values: float) -> torch.Tensor:
    return torch.tensor(values)[None, None, :, None].expand(1, 2, -1, 4).clone()


def fill(cache: KeyValueCache, *values: float) -> torch.Tensor:
    cache.reserve(len(values))
    keys, _ = cache.update(0, columns(*values), -columns(*values))
    return keys


def held(cache: KeyValueCache) -> list[float]:
    return cache._data[0, 0, 0, : cache.length, 0].tolist()


def test_cache_keeps_what_it_is_told() -> None:
    cache = KeyValueCache(1, 2, 4, 8, torch.float32)
    fill(cache, 1, 2, 3)
    cache.keep((0, 1, 2))
    keys = fill(cache, 4, 5, 6, 7)
    assert keys[0, 0, :7, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    cache.keep((2, 3))
    assert held(cache) == [1, 2, 3, 6, 7]
    fill(cache, 8)
    cache.keep(())
    assert held(cache) == [1, 2, 3, 6, 7]


def test_cache_grows_and_keeps_its_columns() -> None:
    cache = KeyValueCache(1, 2, 4, 1, torch.float32)
    before = cache.capacity
    fill(cache, *range(50))
    cache.keep(tuple(range(50)))
    fill(cache, *range(50, 300))
    cache.keep(tuple(range(1, 250, 2)))
    assert cache.capacity > before
    assert held(cache) == [*range(50), *range(51, 300, 2)]


def test_cache_matches_a_plain_list() -> None:
    rng, cache, model = random.Random(0), KeyValueCache(1, 2, 4, 16, torch.float32), []
    for number in range(200):
        rows = [number + i / 100 for i in range(rng.randint(1, 9))]
        fill(cache, *rows)
        kept = sorted(rng.sample(range(len(rows)), rng.randint(0, min(3, len(rows)))))
        cache.keep(tuple(kept))
        model += [rows[i] for i in kept]
        assert held(cache) == pytest.approx(model)


def test_uniform_numbers_are_spread_and_depend_on_everything() -> None:
    values = [uniform(seed, r, t, p) for seed in range(5) for r in range(10) for t in range(4) for p in range(20)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.02)


PROBABILITIES = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (Shaping(1.0), [0.1, 0.4, 0.0, 0.3, 0.2]),
        (Shaping(0.5), [1 / 30, 16 / 30, 0.0, 9 / 30, 4 / 30]),
        (Shaping(1.0, top_k=2), [0.0, 4 / 7, 0.0, 3 / 7, 0.0]),
        (Shaping(1.0, top_p=0.6), [0.0, 4 / 7, 0.0, 3 / 7, 0.0]),
        (Shaping(1.0, top_p=0.4), [0.0, 1.0, 0.0, 0.0, 0.0]),
        (Shaping(1.0, top_k=3, top_p=0.99), [0.0, 4 / 9, 0.0, 3 / 9, 2 / 9]),
        (Shaping(1e-3), [0.0, 1.0, 0.0, 0.0, 0.0]),
        (Shaping(1e-300), [0.0, 1.0, 0.0, 0.0, 0.0]),
        (Shaping(1e300), [0.25, 0.25, 0.0, 0.25, 0.25]),
        (Shaping(10**30), [0.25, 0.25, 0.0, 0.25, 0.25]),
    ],
)
def test_draws_follow_the_shaped_distribution(shaping: Shaping, expected: list[float]) -> None:
    grid = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    tokens = draw_rows(PROBABILITIES.log().expand(3000, -1), shaping, grid)
    got = torch.bincount(tokens, minlength=5) / 3000
    assert got.tolist() == pytest.approx(expected, abs=2e-3)


def test_a_draw_is_the_same_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(64, 50, generator=generator)
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    shaping = Shaping(0.8, 20, 0.9)
    together = draw_rows(rows.log(), shaping, uniforms).tolist()
    assert together == [draw(row, shaping, float(u)) for row, u in zip(rows, uniforms, strict=True)]


def test_barred_ids_are_never_drawn() -> None:
    almost_one = torch.tensor([1 - 1e-16, 0.0], dtype=torch.float64)
    assert set(draw_rows(PROBABILITIES.log().expand(2, -1), Shaping(5.0), almost_one).tolist()) <= {0, 1, 3, 4}
