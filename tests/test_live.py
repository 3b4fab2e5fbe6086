"""The live view: what it folds, what it draws, and that it needs no model."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from refusion.config import AutoregressiveConfig, DecodeConfig, DreamConfig, LladaConfig
from refusion.events import Committed, Drafted, Event, Finished, Selected
from refusion.generate import Config, Model
from refusion.live import LiveView, State, commit_lines, frame, piece

EOS = 0


def decode(ids: list[int]) -> str:
    """Token 0 ends the text, any other id is its character."""
    return "".join(chr(i) for i in ids if i != EOS)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def committed(round: int, start: int, text: str) -> Committed:
    return Committed(round, tuple(range(start, start + len(text))), ids(text))


def drafted(round: int, start: int, text: str) -> Drafted:
    return Drafted(round, tuple(range(start, start + len(text))), ids(text), (0.5,) * len(text))


def folded(*events: Event, slot_size: int | None = 4) -> State:
    state = State(decode, slot_size, (EOS,))
    for event in events:
        state.add(event)
    return state


def drawn(state: State, width: int = 60, **options: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(state, width, **options))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


SUDOKU = "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1"


def test_text_order_whatever_the_order_of_writing() -> None:
    state = folded(drafted(0, 0, "abcdefgh"), Selected(0, (1,), (0.9,)), committed(0, 4, "WXYZ"))
    assert drawn(state)[-1] == "····WXYZ"
    state.add(drafted(1, 0, "abcd"))
    assert drawn(state)[-1] == "abcdWXYZ"
    state.add(committed(1, 0, "ABCD"))
    assert drawn(state)[-1] == "ABCDWXYZ"


def test_drafts_are_dim_and_commits_bright_in_the_colour_of_their_round() -> None:
    state = folded(committed(0, 4, "late"), committed(1, 8, "last"), drafted(2, 0, "open"))
    styles = {frame(state, 60).plain[span.start : span.end]: str(span.style) for span in frame(state, 60).spans}
    assert styles["open"] == "dim"
    assert styles["late"].startswith("bold ") and styles["last"].startswith("bold ")
    assert styles["late"] != styles["last"]


def test_slots_show_the_round_that_wrote_them() -> None:
    state = folded(committed(0, 4, "abcd"), drafted(1, 0, "efgh"), drafted(1, 8, "ijkl"), Selected(1, (2,), (0.9,)))
    assert drawn(state)[1].split()[-3:] == ["·", "0", "?"]


def test_line_breaks_stay() -> None:
    assert drawn(folded(committed(0, 0, SUDOKU)))[-4:] == SUDOKU.split("\n")


@pytest.mark.parametrize("width", [20, 33, 80])
def test_long_text_is_folded_and_nothing_is_lost(width: int) -> None:
    text = '{"name":"Mia","age":34,"city":"Rome","job":"baker","pets":2,"likes":"tea"}'
    lines = drawn(folded(*(committed(i, 4 * i, text[4 * i : 4 * i + 4]) for i in range(19))), width)
    assert max(map(len, lines)) <= width
    assert text in "".join(lines)


def test_without_colour_numbers_name_the_rounds() -> None:
    state = folded(committed(0, 4, "WXYZ"), committed(12, 0, "ABCD"))
    assert drawn(state, numbers=True)[-1] == "¹²ABCD⁰WXYZ"


def test_nothing_after_the_end_is_shown() -> None:
    state = folded(committed(0, 8, "rest"), Committed(1, (0, 1, 2), (*ids("ab"), EOS)))
    assert drawn(state)[-1] == "ab"
    assert state.tokens == 2


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in frame(folded(committed(0, 0, "\x1b[2J")), 60).plain


def test_finished_leaves_the_response_alone() -> None:
    state = folded(committed(0, 0, "abcd"), drafted(1, 4, "efgh"), Finished("stop", ids("abcd"), True))
    assert drawn(state)[-1] == "abcd"


def test_commit_lines_in_the_order_of_writing() -> None:
    event = Committed(3, (16, 17, 18, 19, 24, 25), ids('a"\nbcd'))
    state = folded(event, slot_size=8)
    assert list(commit_lines(event, state)) == [
        'round 3  slot 2  [16..19]  "a\\"\\nb"',
        'round 3  slot 3  [24..25]  "cd"',
    ]
    event = committed(5, 5, "x")
    assert list(commit_lines(event, folded(event, slot_size=None))) == ['token 5  "x"']


def test_a_piece_keeps_the_space_that_decoding_alone_drops() -> None:
    def stripping(tokens: list[int]) -> str:
        return decode(tokens).removeprefix(" ")

    assert piece(stripping, None, ids(" b")) == "b"
    assert piece(stripping, ord("a"), ids(" b")) == " b"


def test_elsewhere_than_on_a_terminal_there_are_plain_lines() -> None:
    out = io.StringIO()
    with LiveView(decode, slot_size=4, stream=out, delay=100) as view:
        for event in (drafted(0, 0, "abcdefgh"), committed(0, 4, "efgh"), committed(1, 0, "abcd")):
            view.add(event)
    assert out.getvalue() == 'round 0  slot 1  [4..7]  "efgh"\nround 1  slot 0  [0..3]  "abcd"\n'


SCRIPT = """
from refusion.events import *
from refusion.live import LiveView
with LiveView(lambda ids: "".join(map(chr, ids)), slot_size=4, delay=0.01) as view:
    view.add(Drafted(0, tuple(range(8)), tuple(map(ord, "abcdefgh")), (0.5,) * 8))
    view.add(Committed(0, (4, 5, 6, 7), tuple(map(ord, "WXYZ"))))
    view.add(Committed(1, (0, 1, 2, 3), tuple(map(ord, "ABCD"))))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal_it_draws_and_ends(no_color: bool) -> None:
    leader, follower = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color", "COLUMNS": "60"}
    environment |= {"NO_COLOR": "1"} if no_color else {}
    subprocess.run([sys.executable, "-c", SCRIPT], stderr=follower, env=environment, timeout=60, check=True)
    os.close(follower)
    out = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert ("\x1b[1;36mWXYZ" in out) == (not no_color)
    assert ("⁰" in out) == no_color
    assert "\x1b[?25h" in out  # the cursor is shown again


@pytest.mark.parametrize("config", [
    DecodeConfig(slot_size=4, block_size=16), AutoregressiveConfig(), LladaConfig(block_size=16, cache="dual"),
    LladaConfig(steps=9), DreamConfig(confidence_threshold=0.7), DreamConfig(order="origin", block_size=8, steps=20),
])  # fmt: skip
def test_forwards_and_tokens_are_counted_as_the_model_counts_them(config: Config, any_model: Model) -> None:
    for seed in range(4):
        settings = replace(config, max_new_tokens=37, temperature=0.7, seed=seed)
        result = any_model.generate([1, 40 + seed, 50, 2], settings)
        state = State(decode, getattr(config, "slot_size", None), any_model.folder.eos_token_ids)
        for event in result.events:
            state.add(event)
        assert state.forwards == result.stats.forwards
        assert state.tokens == len(result.token_ids)
