"""Our models under lm-eval's runner, offline. Skipped where the extra `[eval]` is not installed."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import refusion
from refusion.config import UserError
from refusion.evaluation import benchmark, tasks
from refusion.evaluation.tasks import word_problems

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lm_eval = pytest.importorskip("lm_eval")
    from refusion.evaluation.lm_eval import RefusionLM

pytestmark = pytest.mark.filterwarnings("ignore")  # what its libraries warn of is not ours
CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "decode" / "trained.jsonl").read_text().splitlines()]


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def lm(trained_folder: Path) -> Any:
    return RefusionLM(str(trained_folder), device="cpu", slot_size=4, block_size=16)


@pytest.fixture(scope="module")
def model(trained_folder: Path) -> refusion.Model:
    return refusion.load(trained_folder, device="cpu")


def test_generate_until_writes_what_generate_writes(lm: Any, model: refusion.Model) -> None:
    prompts = [lm.apply_chat_template([{"role": "user", "content": case["prompt"]}]) for case in CASES[:4]]
    texts = lm.generate_until([request(p, {"until": ["####"], "max_gen_toks": 40}) for p in prompts])
    config = refusion.DecodeConfig(slot_size=4, block_size=16, stop=("####",), max_new_tokens=40)
    assert texts == [model.generate(case["prompt"], config).text for case in CASES[:4]]
    assert all("####" not in text for text in texts) and any(texts)


def test_settings_given_to_the_model_win_over_the_tasks(trained_folder: Path) -> None:
    short = RefusionLM(str(trained_folder), device="cpu", max_new_tokens=3, method="autoregressive")
    text = short.generate_until([request(CASES[0]["prompt"], {"until": [], "max_gen_toks": 40})])[0]
    assert len(short.model.tokenizer.encode(text)) <= 3


def test_loglikelihood_is_the_models(lm: Any, model: refusion.Model) -> None:
    context, answer = CASES[0]["prompt"], CASES[0]["response"]
    ids = model.tokenizer.encode(context)
    whole = model.tokenizer.encode(context + " " + answer)
    found = model.likelihood(ids, whole[len(ids) :], refusion.DecodeConfig(slot_size=4, block_size=16))
    for first, second in ((context, " " + answer), (context + " ", answer)):
        assert lm.loglikelihood([request(first, second)]) == [(found.log_probability, found.greedy)]
    assert found.log_probability < 0


def test_loglikelihood_of_a_whole_text_needs_no_context(lm: Any) -> None:
    text = CASES[0]["response"]
    rolling, alone = lm.loglikelihood_rolling([request(text)])[0], lm.loglikelihood([request("", text)])[0][0]
    assert rolling == pytest.approx(alone) and math.isfinite(rolling)


def test_a_task_in_a_local_file(lm: Any, model: refusion.Model, tmp_path: Path) -> None:
    """Through lm-eval's own runner: exact match on a JSON Lines file of ours."""
    from lm_eval import simple_evaluate

    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps({"q": c["prompt"], "a": c["response"]}) + "\n" for c in CASES[:3]))
    task = {
        "task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["zzz"], "max_gen_toks": 40, "do_sample": False}, "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    report = simple_evaluate(model=lm, tasks=[task], apply_chat_template=True, bootstrap_iters=0, log_samples=True)
    config = refusion.DecodeConfig(slot_size=4, block_size=16, max_new_tokens=40)
    written = [model.generate(case["prompt"], config).text for case in CASES[:3]]
    assert [sample["resps"][0][0] for sample in report["samples"]["local"]] == written
    right = sum(text.strip() == case["response"].strip() for text, case in zip(written, CASES, strict=False))
    assert report["results"]["local"]["exact_match,none"] == pytest.approx(right / 3)


def gsm8k(data: Path) -> dict[str, Any]:
    """lm-eval's GSM8K, on a local file and with our prompt: its two ways of finding the number, and its comparison."""

    def found(name: str, pattern: str, which: int) -> dict[str, Any]:
        regex = {"function": "regex", "regex_pattern": pattern, "group_select": which}
        return {"name": name, "filter": [regex, {"function": "take_first"}]}

    return {
        "task": "gsm8k_local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "output_type": "generate_until", "doc_to_text": word_problems.PROMPT.replace("{question}", "{{question}}"),
        "doc_to_target": "{{answer}}", "generation_kwargs": {"until": ["zzz"], "max_gen_toks": 40, "do_sample": False},
        "filter_list": [
            found("strict-match", r"#### (\-?[0-9\.\,]+)", 0), found("flexible-extract", r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1),
        ],
        "metric_list": [{
            "metric": "exact_match", "ignore_case": True, "ignore_punctuation": False,
            "regexes_to_ignore": [",", r"\$", "(?s).*#### ", r"\.$"],
        }],
    }  # fmt: skip


WRITTEN = ["12/3=4\n#### 8", "In all it is 1800.", "5-9=-4\n#### 4"]  # right with the mark, right without it, wrong


@pytest.mark.parametrize("texts", [None, WRITTEN], ids=["the model's own answers", "answers of every kind"])
def test_gsm8k_is_answered_and_judged_as_by_our_own_task(
    texts: list[str] | None, lm: Any, model: refusion.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import simple_evaluate

    data = Path(__file__).parent / "data" / "benchmarks" / "gsm8k" / "test.jsonl"
    if texts is not None:
        asked = [model.encode(item.prompt) for item in tasks.load(tasks.task_named("gsm8k"), data)]

        def written(self: Any, prompt: Any, config: Any, raw: bool = False) -> refusion.Result:
            text = texts[asked.index(self.encode(prompt, raw))]
            return refusion.Result(text, [], "stop", (), refusion.Stats(1, 1, 1, 1, 1, 1.0), {}, ())

        monkeypatch.setattr(refusion.Model, "generate", written)
    config = refusion.DecodeConfig(slot_size=4, block_size=16, max_new_tokens=40)
    benchmark.run(model, "gsm8k", data, config=config, samples=tmp_path / "ours.jsonl")
    ours = [json.loads(line) for line in (tmp_path / "ours.jsonl").read_text().splitlines()[1:]]
    report = simple_evaluate(model=lm, tasks=[gsm8k(data)], apply_chat_template=True, bootstrap_iters=0, log_samples=True)
    theirs = {(s["filter"], s["doc_id"]): s for s in report["samples"]["gsm8k_local"]}
    for number, sample in enumerate(ours):
        strict, flexible = (theirs[name, number] for name in ("strict-match", "flexible-extract"))
        assert strict["resps"][0][0] == sample["response"]
        judged = strict if strict["filtered_resps"][0] != "[invalid]" else flexible
        assert sample["right"] == bool(judged["exact_match"])
    assert texts is None or [sample["right"] for sample in ours] == [True, True, False]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"method": "refushion"}, "unknown method 'refushion'; there is .*did you mean 'refusion'"),
    ({"slot_sizes": 4}, "unknown setting 'slot_sizes'; did you mean 'slot_size'"),
    ({"slot_size": 0}, "slot_size must be at least 1"),
])  # fmt: skip
def test_misuse(arguments: dict[str, Any], message: str, trained_folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        RefusionLM(str(trained_folder), **arguments)
