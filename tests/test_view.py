"""`refusion view`: traces are read back as they were written, steps are what events say, pages hold text as text."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import refusion
from refusion.cli import main
from refusion.config import UserError
from refusion.events import Committed, Drafted, Event, Finished, Selected, Verified, to_dict
from refusion.view.frames import frames, rounds, visible
from refusion.view.html import KINDS, data, page
from refusion.view.replay import SLOTS_DELAY, replay
from refusion.view.trace import Trace, TraceWriter, read_trace

END = 9
TEXTS: dict[int, str | bytes] = {1: "a", 2: " b", 3: "c\n", END: "<end>", 4: b"\xe2\x82", 5: b"\xac", 6: b"\xff"}
# The worked example of `frames`: slots of 2; what was not accepted is drafted again in the next round.
EVENTS: tuple[Event, ...] = (
    Drafted(0, (0, 1, 2, 3), (1, 2, 3, END), (0.9, 0.8, 0.95, 0.3)),
    Selected(0, (0, 1), (0.9, 0.95)),
    Verified(0, (0, 1, 2, 3), (1, 2, 3, END), (None, 0.7, None, 0.2), 3),
    Committed(0, (0, 1), (1, 2)),
    Drafted(1, (2, 3), (3, END), (0.99, 0.6)),
    Selected(1, (1,), (0.99,)),
    Verified(1, (2, 3), (3, END), (None, 0.9), 2),
    Committed(1, (2, 3), (3, END)),
    Finished("stop", (1, 2, 3), True),
)


def trace(events: tuple[Event, ...] = EVENTS, prompt: str = "p", **settings: Any) -> Trace:
    return Trace("nano", prompt, {"slot_size": 2, **settings}, events, TEXTS, frozenset({END}))


def written(folder: Path, events: tuple[Event, ...] = EVENTS, prompt: str = "p", texts: dict[int, Any] = TEXTS) -> Path:
    path = folder / "trace.jsonl"
    with path.open("w", encoding="utf-8") as file:
        writer = TraceWriter(file, lambda token: texts[token])
        writer.request(model="nano", method="refusion", prompt=prompt, prompt_ids=[1], settings={"slot_size": 2}, eos_ids=[END])
        for event in events:
            writer.add(event)
        writer.result({"text": "a bc\n", "token_ids": [1, 2, 3], "finish_reason": "stop", "stats": {"tokens": 4, "forwards": 3}})
    return path


# --- the file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, prompt="é\u2028 😀"))
    assert read.events == EVENTS and read.complete
    assert (read.model, read.prompt, read.settings, read.eos) == ("nano", "é\u2028 😀", {"slot_size": 2}, {END})
    assert read.texts == {t: TEXTS[t] for t in (1, 2, 3, END)} and read.slot_size == 2
    assert read.text == "a bc\n" and read.figures() == "4 tokens in 3 forwards: 1.33 tokens per forward"


@pytest.mark.parametrize("lines", range(1, len(EVENTS) + 2))
def test_a_trace_that_was_cut_short_can_be_looked_at(lines: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    read = read_trace(path)
    assert read.events == EVENTS[: lines - 1] and read.text is None and read.figures() is None
    assert read.complete == (lines == len(EVENTS) + 1)
    assert len(frames(read)) == lines and page(read)


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    for end in (1, 40, len(lines[3]) - 2):
        path.write_text("".join([*lines[:3], lines[3][:end]]))
        assert read_trace(path).events == EVENTS[:2]
    path.write_text(lines[0][:20])
    with pytest.raises(UserError, match="line 1: not JSON"):
        read_trace(path)


def test_older_traces_without_texts_show_numbers(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    lines = [{"event": "request", "model": "m", "prompt": "p", "prompt_ids": [1], "settings": {"slot_size": 2}}]
    lines += map(to_dict, EVENTS)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_trace(path)
    assert read.decode([1, 2, END]) == "⟨1⟩⟨2⟩" and read.eos == {END}, "what was written behind the last token ended it"
    assert [step.tokens for step in frames(read)] == [step.tokens for step in frames(trace())]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    assert read_trace(path).eos == frozenset(), "nobody knows yet"


REQUEST = {"event": "request", "model": "m", "prompt": "p", "settings": {"slot_size": 2}}
DRAFTED = {"event": "drafted", "round": 0, "positions": [0], "tokens": [1], "probabilities": [0.5]}
BROKEN: list[tuple[Any, str]] = [
    ("no json", "line 2: not JSON"), ("[" * 100_000, "line 2: not JSON"), (7, "line 2: not a line of a trace"),
    ({"event": 7}, "line 2: not a line of a trace"), ({"event": "danced"}, "line 2: unknown event 'danced'"),
    ({**DRAFTED, "round": -1}, "line 2: round must be whole numbers"),
    ({**DRAFTED, "positions": [1 << 40]}, "line 2: positions must be whole numbers"),
    ({**DRAFTED, "round": True}, "line 2: round must be whole numbers"), (REQUEST, "line 2: unknown event 'request'"),
    ({**DRAFTED, "probabilities": [float("nan")]}, "line 2: probabilities must be 1 numbers"),
    ({**DRAFTED, "positions": 0}, "line 2: positions must be whole numbers"),
    ({**DRAFTED, "positions": [0, 1]}, "line 2: tokens must be as many as positions"),
    ({**DRAFTED, "tokens": ["x"]}, "line 2: tokens must be whole numbers"),
    ({**DRAFTED, "probabilities": ["x"]}, "line 2: probabilities must be 1 numbers"),
    ({**DRAFTED, "texts": []}, "line 2: texts must be as many as tokens"),
    ({**DRAFTED, "texts": [[300]]}, "line 2: texts must be whole numbers from 0 to 255"),
    ({k: v for k, v in DRAFTED.items() if k != "tokens"}, "line 2: there is no 'tokens'"),
    ({"event": "selected", "round": 0, "slots": [1], "scores": []}, "line 2: scores must be 1 numbers"),
    ({"event": "verified", "round": 0, "positions": [0], "tokens": [1], "probabilities": [None], "accepted": 2}, "line 2: prob"),
    ({"event": "finished", "reason": "stop", "tokens": [], "eos": 1}, "line 2: eos must be true or false, got 1"),
    ({"event": "result", "text": "", "stats": {"tokens": 1}}, "line 2: there is no 'forwards'"),
    ({"event": "result", "text": None, "stats": {}}, "line 2: text must be a text"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_a_broken_line_is_named(line: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps(REQUEST) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    assert main(["view", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and f"{path}: {message}" in err


@pytest.mark.parametrize(("content", "message"), [
    (b"", "(empty)"), (b"\xff\xfe", "not UTF-8"), (b'{"event": "drafted"}\n', "begins with the request"),
    (b'{"event": "request", "model": 1, "prompt": "", "settings": {}}\n', "line 1: model must be a text"),
    (b'{"event": "request", "model": "", "prompt": "", "settings": []}\n', "line 1: settings must be an object"),
    (b'{"event": "request", "model": "", "settings": {}}\n', "line 1: there is no 'prompt'"),
    (b'{"event": "request", "model": "", "prompt": "", "settings": {}, "eos_ids": [-1]}\n', "line 1: eos_ids must be whole"),
])  # fmt: skip
def test_files_that_are_no_traces(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        read_trace(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_nothing_may_follow_the_end(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], lines[1], lines[-1]]))
    with pytest.raises(UserError, match="line 11: 'drafted' after the end of the answer"):
        read_trace(path)
    path.write_text("".join([*lines, lines[1]]))
    with pytest.raises(UserError, match="line 12: 'drafted' after the result"):
        read_trace(path)


# --- the steps


def test_the_worked_example() -> None:
    steps = frames(trace())
    kinds = [[cell.kind for cell in step.cells] for step in steps]
    assert kinds[:5] == [
        [], ["draft"] * 4, ["draft"] * 4, ["accepted"] * 3 + ["rejected"], ["written", "written", "open", "open"],
    ]
    assert kinds[-1] == ["written"] * 4
    assert [step.chosen for step in steps[:6]] == [(), (), (0, 1), (0, 1), (), ()]
    assert [step.forwards for step in steps] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert [step.tokens for step in steps] == [0, 0, 0, 0, 2, 2, 2, 2, 4, 4]
    assert [cell.round for cell in steps[-1].cells] == [0, 0, 1, 1] and rounds(trace()) == 2
    last = steps[-1].cells[3]
    assert (last.drafted, last.verified) == (0.6, 0.9), "what counts is the draft that was written"
    assert steps[3].note == "verified 4 tokens: the first 3 hold" and steps[-1].note == "finished: the model ended its answer"


def test_token_by_token_a_step_is_a_token() -> None:
    events: list[Event] = []
    for i, token in enumerate((1, 2, END)):
        events += [Drafted(i, (i,), (token,), (0.5 + i / 10,)), Committed(i, (i,), (token,))]
    steps = frames(trace((*events, Finished("stop", (1, 2), True)), slot_size=None))
    assert len(steps) == 5 and [step.tokens for step in steps] == [0, 1, 2, 3, 3]
    assert [cell.drafted for cell in steps[-1].cells] == [0.5, 0.6, 0.7]


def test_tokens_that_are_a_character_together_are_shown_by_the_first() -> None:
    events = (Committed(0, (0, 1, 2, 3), (1, 4, 5, 6)), Finished("length", (1, 4, 5, 6), False))
    assert frames(trace(events))[-1].texts == ("a", "€", "", "⟨FF⟩")


def test_text_can_stand_anywhere() -> None:
    assert visible("a\x1b[2J\u202eb\u2028\ud800\n\tc") == "a⟨1B⟩[2J⟨202E⟩b⟨2028⟩\ufffd\n\tc"


# --- the page


class _Page(HTMLParser):
    """Elements with their attributes, and what stands in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, text: str) -> None:
        if self._inside:
            self.scripts.append(text)


def played(shown: dict[str, Any]) -> Iterator[list[Any]]:
    """The cells of every step, as page.js makes them of the changes."""
    cells: list[Any] = []
    for step in shown["frames"]:
        cells += [None] * (step["length"] - len(cells))
        for change in step["changes"]:
            cells[change[0]] = change
        del cells[step["length"] :]
        yield list(cells)


def test_the_page_needs_nothing_else_and_holds_every_step() -> None:
    text = page(trace())
    parsed = _Page(text)
    assert not any(name in attributes for _, attributes in parsed.elements for name in ("src", "href", "srcset", "action"))
    assert "@import" not in text and "url(" not in text and "http:" not in text and "https:" not in text
    assert [tag for tag, _ in parsed.elements].count("script") == 2
    shown = json.loads(parsed.scripts[0])
    assert shown == json.loads(json.dumps(data(trace())))
    steps = frames(trace())
    for step, cells in zip(steps, played(shown), strict=True):
        assert [KINDS[c[1]] if c else "open" for c in cells] == [cell.kind for cell in step.cells]
        assert [c[2] if c else "" for c in cells] == list(step.texts)


def test_the_policy_of_the_page_lets_its_own_style_and_program_through() -> None:
    text = page(trace())
    policy = next(a["content"] for tag, a in _Page(text).elements if a.get("http-equiv") == "Content-Security-Policy") or ""
    assert policy.startswith("default-src 'none'; ")
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        inside = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert len(inside) == 1 and f"{directive} 'sha256-{digest}'" in policy


def test_the_page_knows_the_kinds_by_the_same_numbers() -> None:
    named = re.search(r"const KINDS = (\[.*?\]);", _Page(page(trace())).scripts[1])
    assert named is not None and tuple(json.loads(named[1])) == KINDS


@pytest.mark.parametrize(
    "evil", ["</script><script>alert(1)</script>", "<!--<script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}"]
)
def test_text_of_a_trace_stays_text(evil: str, tmp_path: Path) -> None:
    clean = _Page(page(read_trace(written(tmp_path))))
    read = read_trace(written(tmp_path, prompt=evil, texts={**TEXTS, 1: evil}))
    read = replace(read, model=evil, text=evil, settings={**read.settings, "order": evil})
    clean_settings = [("div", {}), ("dt", {}), ("dd", {})]
    found = _Page(page(read))
    at = next(i for i, (tag, _) in enumerate(found.elements) if tag == "noscript") - len(clean_settings)
    assert found.elements[at : at + 3] == clean_settings
    del found.elements[at : at + 3]
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in clean.elements]
    assert json.loads(found.scripts[0])["frames"][-1]["length"] == 4 and found.scripts[1:] == clean.scripts[1:]
    assert any(evil in change[2] for step in json.loads(found.scripts[0])["frames"] for change in step["changes"])


# --- the animation and the terminal


def test_the_animation_has_a_picture_a_step(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    from refusion.view.gif import LAST_STEP, WIDTH, animation

    path = tmp_path / "x.gif"
    path.write_bytes(animation(trace(), speed=2))
    with image.open(path) as opened:
        durations = []
        for number in range(opened.n_frames):
            opened.seek(number)
            durations.append(opened.info["duration"])
        assert opened.n_frames == len(frames(trace()))
        assert opened.size == (WIDTH, 28 + 20 + 20 + 2 * 30 + 12 + 118), "a line of prompt, two of text, the foot"
        assert durations == [350] * (opened.n_frames - 1) + [LAST_STEP]


def test_an_animation_of_nothing_and_of_much(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    from refusion.view.gif import animation

    long = tuple(Committed(i, (2 * i, 2 * i + 1), (3, 3)) for i in range(80))  # 160 lines, which scroll
    for events in ((), long):
        with image.open(io.BytesIO(animation(trace(events, prompt="long " * 400)))) as opened:
            assert opened.n_frames == len(events) + 1 and opened.size[1] < 1300


def test_without_pillow_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = written(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert main(["view", str(path), "--gif", str(tmp_path / "x.gif")]) == 2
    assert capsys.readouterr().err == "error: --gif needs Pillow: pip install 'refusion[view]'\n"
    assert not (tmp_path / "x.gif").exists()


def test_without_a_terminal_there_is_a_line_for_every_slot() -> None:
    out = io.StringIO()
    replay(trace(), stream=out)
    assert out.getvalue().splitlines() == ['round 0  slot 0  [0..1]  "a b"', 'round 1  slot 1  [2..3]  "c\\n"']


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_on_a_terminal_the_prompt_stands_above(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    waits: list[float] = []
    monkeypatch.setattr("refusion.live.time.sleep", waits.append)
    out = _Terminal()
    replay(trace(prompt="why\x1b[2J?"), speed=2, stream=out)
    assert out.getvalue().startswith("why⟨1B⟩[2J?\n\n") and "a b" in out.getvalue()
    if term == "xterm":
        assert waits and set(waits) == {SLOTS_DELAY / 2 / 2}, "half of the delay for a selection, half for a commit"
        assert "round 1  4 forwards  3 tokens" in out.getvalue()


# --- the command


@pytest.mark.parametrize("method", ["refusion", "autoregressive"])
def test_from_generate_to_view(method: str, trained_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, html, gif = (str(tmp_path / name) for name in ("t.jsonl", "t.html", "t.gif"))
    command = ["generate", "--model", str(trained_folder), "--method", method, "--trace", path, "--max-new-tokens", "24", "--json"]
    assert main([*command, "Tom has 5 nuts."]) == 0
    result = json.loads(capsys.readouterr().out)
    read = read_trace(Path(path))
    assert read.text == result["text"] and read.complete and read.settings["max_new_tokens"] == 24
    last = frames(read)[-1]
    assert last.tokens == result["stats"]["tokens"] and last.forwards == result["stats"]["forwards"]
    assert [cell.token for cell in last.cells][: len(result["token_ids"])] == result["token_ids"]
    assert main(["view", path, "--html", html, "--gif", gif]) == 0
    assert capsys.readouterr() == ("", "")
    assert "<!doctype html>" in Path(html).read_text() and Path(gif).read_bytes().startswith(b"GIF89a")
    assert main(["view", path]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) >= last.round and err.endswith("tokens per forward\n")


def test_a_cut_trace_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, EVENTS[:4])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert main(["view", str(path)]) == 0
    assert capsys.readouterr().err == f"warning: {path} ends before the answer is finished\n"


@pytest.mark.parametrize(("flags", "message"), [
    (["--speed", "0"], "--speed must be between"), (["--speed", "nan"], "--speed must be between"),
    (["--html", "{trace}"], "is the trace itself"), (["--gif", "/nowhere/x.gif"], "cannot be written"),
    (["--html", "/"], "cannot be written"), (["--gif", "{trace}"], "is the trace itself"),
    (["--html", "/nowhere/x", "--gif", "/nowhere/x"], "need a file each"),
])  # fmt: skip
def test_misuse(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    before = path.read_text()
    assert main(["view", str(path), *(flag.replace("{trace}", str(path)) for flag in flags)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and path.read_text() == before


def test_the_trace_of_masked_diffusion_can_be_looked_at() -> None:
    """Its tokens come in any order, without slots or verification."""
    events = (
        Drafted(0, (0, 1, 2), (1, 2, 3), (0.3, 0.9, 0.2)), Committed(0, (1,), (2,)),
        Drafted(1, (0, 2), (1, 3), (0.8, 0.7)), Committed(1, (0, 2), (1, 3)), Finished("length", (1, 2, 3), False),
    )  # fmt: skip
    steps = frames(trace(events, slot_size=None))
    assert [cell.round for cell in steps[-1].cells] == [1, 0, 1] and steps[-1].forwards == 2
    assert refusion.__version__ and page(trace(events, slot_size=None))
