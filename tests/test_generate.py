"""`load`, `generate` and `stream` on the recorded folder: prompts, settings, ends, stop strings, sampling,
statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import refusion
from refusion.config import UserError
from refusion.events import Committed, Drafted, Finished

FOLDER = Path(__file__).parent / "cases" / "decode" / "trained"
CASES = [json.loads(line) for line in (FOLDER.parent / "trained.jsonl").read_text().splitlines()]
CASE = CASES[0]
AR = refusion.AutoregressiveConfig
SLOTS = refusion.DecodeConfig


@pytest.fixture(scope="module")
def model() -> refusion.Model:
    return refusion.load(FOLDER, device="cpu")


def test_text_messages_and_ids_are_the_same_prompt(model: refusion.Model) -> None:
    settings = SLOTS(**CASE["settings"])
    by_text = model.generate(CASE["prompt"], settings)
    by_message = model.generate([{"role": "user", "content": CASE["prompt"]}], settings)
    by_ids = model.generate(CASE["prompt_ids"], settings)
    raw = model.generate("<bos>" + CASE["prompt"] + "<sep>", settings, raw=True)
    assert by_text.token_ids == by_message.token_ids == by_ids.token_ids == raw.token_ids
    assert list(by_text.token_ids) == CASE["response_ids"]
    assert by_text.text == CASE["response"]


def test_a_list_of_prompts_gives_a_list(model: refusion.Model) -> None:
    settings = SLOTS(**CASE["settings"])
    results = model.generate([CASE["prompt"], CASES[1]["prompt"]], settings)
    ids = model.generate([CASE["prompt_ids"], CASES[1]["prompt_ids"]], settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in ids]
    assert results[0].token_ids == model.generate(CASE["prompt"], settings).token_ids


def test_stream_ends_with_the_result(model: refusion.Model) -> None:
    stream = model.stream(CASE["prompt"], SLOTS(**CASE["settings"]))
    events = []
    while True:
        try:
            events.append(next(stream))
        except StopIteration as stop:
            result = stop.value
            break
    assert tuple(events) == result.events
    assert isinstance(events[0], Drafted) and isinstance(events[-1], Finished)
    committed: dict[int, int] = {}
    for event in events:
        if isinstance(event, Committed):
            assert not committed.keys() & set(event.positions), "a token is committed once"
            committed |= zip(event.positions, event.tokens, strict=True)
    assert [committed[i] for i in range(len(result.token_ids))] == list(result.token_ids)


def test_statistics(model: refusion.Model) -> None:
    result = model.generate(CASE["prompt_ids"], SLOTS(**CASE["settings"]))
    assert result.finish_reason == "stop"
    assert result.stats.tokens == len(result.token_ids) + 1, "end-of-sequence is a token that was written"
    assert result.stats.prompt_tokens == len(CASE["prompt_ids"])
    assert result.stats.rows >= result.stats.prompt_tokens + result.stats.tokens
    assert result.stats.tokens_per_forward == result.stats.tokens / result.stats.forwards
    short = model.generate(CASE["prompt_ids"], SLOTS(max_new_tokens=5, slot_size=4))
    assert short.finish_reason == "length" and short.stats.tokens == len(short.token_ids) == 5
    plain = json.loads(json.dumps(result.to_dict(events=True)))
    assert plain["stats"]["forwards"] == result.stats.forwards and plain["events"][-1]["event"] == "finished"


def test_autoregressive_is_greedy_next_token(model: refusion.Model) -> None:
    import torch

    result = model.generate(CASE["prompt_ids"], AR(max_new_tokens=12, ignore_eos=True))
    ids = list(CASE["prompt_ids"])
    for _ in range(12):
        width = len(ids)
        mask = torch.ones(width, width, dtype=torch.bool).tril()[None, None]
        with torch.inference_mode():
            hidden = model.transformer(torch.tensor([ids]), torch.arange(width)[None], mask)
            logits = model.transformer.logits(hidden)[0, -1]
        ids.append(max((i for i in range(89) if i != 4), key=lambda i: float(logits[i])))
    assert list(result.token_ids) == ids[-12:]
    assert result.stats.forwards == 12
    assert result.stats.rows == len(CASE["prompt_ids"]) + 11


@pytest.mark.parametrize("config", [SLOTS(max_new_tokens=72), AR(max_new_tokens=72)])
@pytest.mark.parametrize("stop", ["31.", " eggs", "Then Max", "doubles: 3", "<the beginning>"])
def test_stop_strings_cut_text_and_tokens(model: refusion.Model, config: Any, stop: str) -> None:
    """Also where the string spans slots and its end is written before its beginning."""
    from dataclasses import replace

    whole = model.generate(CASE["prompt"], config)
    stop = whole.text[:6] if stop == "<the beginning>" else stop
    cut = model.generate(CASE["prompt"], replace(config, stop=(stop,)))
    assert stop in whole.text, "the case must contain it"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert model.tokenizer.decode(cut.token_ids) == cut.text[: len(model.tokenizer.decode(cut.token_ids))]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.stats.tokens == len(cut.token_ids)
    assert cut.events[-1] == Finished("stop", tuple(cut.token_ids), False), "the events end where the text ends"
    assert cut.stats.forwards <= whole.stats.forwards


def test_a_stop_string_behind_the_end_has_no_effect(model: refusion.Model) -> None:
    """Tokens committed after end-of-sequence are no text (TRAPS 7)."""
    for case in CASES[:40]:
        settings = SLOTS(**{**case["settings"], "stop": ("zzz",)})
        assert list(model.generate(case["prompt_ids"], settings).token_ids) == case["response_ids"]


def test_earliest_of_several_stops_wins(model: refusion.Model) -> None:
    whole = model.generate(CASE["prompt"], SLOTS(max_new_tokens=72)).text
    cut = model.generate(CASE["prompt"], SLOTS(max_new_tokens=72, stop=("doubles", "buys", "never")))
    assert cut.text == whole[: min(whole.index("doubles"), whole.index("buys"))]


def test_sampling_is_seeded(model: refusion.Model) -> None:
    def text(seed: int, **more: Any) -> str:
        return model.generate(CASE["prompt"], SLOTS(max_new_tokens=40, temperature=1.5, seed=seed, **more)).text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(6)}) > 1
    greedy = model.generate(CASE["prompt"], SLOTS(max_new_tokens=40)).text
    assert text(3, top_k=1) == greedy, "top_k = 1 leaves nothing to chance"
    assert text(3, top_p=1e-6) == greedy


def test_ignore_eos_fills_the_budget(model: refusion.Model) -> None:
    for config in (SLOTS(max_new_tokens=80, ignore_eos=True), AR(max_new_tokens=80, ignore_eos=True)):
        result = model.generate(CASE["prompt"], config)
        assert len(result.token_ids) == 80 and result.finish_reason == "length"
        assert 4 not in result.token_ids, "[MASK] is never emitted"


def test_mask_text_is_not_a_mask(model: refusion.Model) -> None:
    assert 4 not in model.encode("Max has <mask> eggs.")


def test_budget_of_one_and_short_last_slot(model: refusion.Model) -> None:
    for n in (1, 2, 7, 9, 33):
        result = model.generate(CASE["prompt"], SLOTS(max_new_tokens=n, ignore_eos=True, slot_size=8, block_size=20))
        assert len(result.token_ids) == n


def test_defaults_come_from_the_model_then_the_package(model: refusion.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.settings().to_dict()["slot_size"] == 8
    monkeypatch.setitem(model.folder.defaults, "slot_threshold", 0.7)
    monkeypatch.setitem(model.folder.defaults, "max_new_tokens", 50)
    settings = model.settings(SLOTS(max_new_tokens=60)).to_dict()
    assert (settings["slot_threshold"], settings["max_new_tokens"]) == (0.7, 60)
    assert (settings["token_threshold"], settings["block_size"]) == (0.4, 32)


def test_context(model: refusion.Model) -> None:
    with pytest.raises(UserError, match="context"):
        model.generate([7] * 513)
    with pytest.raises(UserError, match="max_new_tokens"):
        model.generate([7] * 500, SLOTS(max_new_tokens=13))
    assert model.generate([7] * 510, SLOTS(ignore_eos=True)).stats.tokens == 2, "a budget not asked for shrinks"


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("", "empty"),
        ([], "empty"),
        ([89], "89"),
        ([-1], "-1"),
        ([1.5], "1.5"),
        ([{"role": "user"}], "content"),
        (7, "int"),
        (b"abc", "bytes"),
        ("\ud800", "Unicode"),
        ("  \n", "empty"),
        ([{"role": "user", "content": 3}], "content"),
    ],
)
def test_bad_prompts(model: refusion.Model, prompt: Any, word: str) -> None:
    with pytest.raises(UserError, match=word):
        model.generate(prompt)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"slot_threshold": 1.5}, "slot_threshold"), ({"token_threshold": -0.1}, "token_threshold"),
        ({"slot_size": 0}, "slot_size"), ({"slot_size": 8, "block_size": 4}, "block_size"),
        ({"max_new_tokens": 0}, "max_new_tokens"), ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"), ({"top_k": 1.5}, "top_k"), ({"seed": -1}, "seed"), ({"stop": ("",)}, "stop"),
        ({"stop": (3,)}, "stop"), ({"slot_size": True}, "slot_size"), ({"max_new_tokens": "8"}, "max_new_tokens"),
    ],
)  # fmt: skip
def test_bad_settings_name_the_setting(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        SLOTS(**settings)
    assert "\n" not in str(caught.value)


def test_config_must_be_a_config(model: refusion.Model) -> None:
    with pytest.raises(UserError, match="dict"):
        model.generate("x", {"slot_size": 8})  # type: ignore[call-overload]


def test_one_of_slot_and_block_alone_fits_itself() -> None:
    assert SLOTS(slot_size=64).resolve().block_size == 64
    assert SLOTS(block_size=4).resolve().slot_size == 4


def test_a_barred_token_is_not_drafted_however_likely(model: refusion.Model) -> None:
    """Where the mask has all the probability that float32 can hold, the best allowed token is taken."""
    from refusion.methods.base import Forward
    from refusion.models.runner import Runner, barred_ids
    from refusion.sampling import Shaping

    class Certain:
        config, lm_head = model.transformer.config, model.transformer.lm_head

        def together(self, tokens: Any, *rest: Any) -> Any:
            import torch

            return torch.zeros(1, tokens.shape[1], 4)

        def logits(self, hidden: Any) -> Any:
            import torch

            out = torch.full((hidden.shape[0], 89), -200.0)
            out[:, 0], out[:, 7] = 0.0, -150.0
            return out

    for shaping in (Shaping(), Shaping(1.0), Shaping(1e-30), Shaping(1.0, 3, 0.5)):
        runner = Runner(Certain(), barred_ids(89, range(89), 0), 8)  # type: ignore[arg-type]
        answer = runner(Forward((5,), (0,), (0,), (0,), uniforms=(0.3,), shaping=shaping))
        assert answer.tokens == (7,)


def test_broken_weights_are_noticed() -> None:
    broken = refusion.load(FOLDER, device="cpu")
    broken.transformer.model.norm.weight.data.fill_(float("nan"))
    for config in (SLOTS(), AR(), SLOTS(temperature=1.0)):
        with pytest.raises(UserError, match="not finite"):
            broken.generate(CASE["prompt"], config)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"slto_size": 4}, "slot_size"),
        ({"block_size": 4, "slot_size": 8}, "block_size"),
        ({"temperature": -1}, "temperature"),
        ({"method": 5}, "method"),
        ({"ignore_eos": "no"}, "ignore_eos"),
    ],
)
def test_bad_defaults_of_a_folder_name_its_file(tmp_path: Path, defaults: dict[str, Any], words: str) -> None:
    import shutil

    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "refusion": defaults}))
    with pytest.raises(UserError, match=words) as caught:
        refusion.load(folder)
    assert "generation_config.json" in str(caught.value)


def test_unset_defaults_of_a_folder_count_as_absent(tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    defaults = {"temperature": None, "slot_size": None, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "refusion": defaults}))
    assert len(refusion.load(folder).generate(CASE["prompt"], SLOTS(ignore_eos=True)).token_ids) == 9


def test_numbers_of_numpy_are_numbers(model: refusion.Model) -> None:
    import numpy as np

    settings = SLOTS(max_new_tokens=np.int64(9), slot_threshold=np.float32(0.5), seed=np.uint8(3))  # type: ignore[arg-type]
    result = model.generate(list(np.array(CASE["prompt_ids"])), settings)
    assert result.stats.tokens == 9 and json.dumps(result.to_dict())


@pytest.mark.parametrize("stops", [(" eggs", "20 eggs. Then", "s"), ("31.", "20 + 11 = 31. Then the", "11 =")])
def test_overlapping_stops_do_not_depend_on_slots(model: refusion.Model, stops: tuple[str, ...]) -> None:
    whole = model.generate(CASE["prompt"], SLOTS(max_new_tokens=72))
    texts = []
    for size, threshold in ((1, 0.9), (8, 0.9), (16, 0.1), (72, 0.5)):
        settings = SLOTS(max_new_tokens=72, slot_size=size, block_size=72, slot_threshold=threshold)
        if model.generate(CASE["prompt"], settings).token_ids == whole.token_ids:
            from dataclasses import replace

            texts.append(model.generate(CASE["prompt"], replace(settings, stop=stops)).text)
    assert len(texts) >= 2 and len(set(texts)) == 1
