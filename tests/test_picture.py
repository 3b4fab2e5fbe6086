"""Pictures of answers: every token once, in slots, by rounds; and always well-formed XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from refusion.evaluation.picture import SHADES, order
from refusion.events import Committed
from refusion.generate import Result, Stats

SVG = "{http://www.w3.org/2000/svg}"
TEXTS = {1: "a", 2: "\n", 3: "<&>", 4: "\x00"}


def result(tokens: list[int], *commits: Committed) -> Result:
    return Result("", tokens, "length", commits, Stats(1, len(tokens), 2, 9, 2, 1.0), {"slot_size": 2}, (1,))


def drawn(prompt: str, answer: Result) -> ET.Element:
    return ET.fromstring(order(prompt, answer, lambda ids: "".join(TEXTS[i] for i in ids)))


def test_tokens_stand_in_their_slots_in_the_colour_of_the_round_that_wrote_them() -> None:
    answer = result([1, 2, 3, 4], Committed(4, (2, 3), (3, 4)), Committed(7, (0, 1), (1, 2)))
    picture = drawn("x", answer)
    cells = picture.findall(f"{SVG}rect")
    assert [cell.get("fill") for cell in cells] == [SHADES[1], SHADES[1], SHADES[0], SHADES[0]]
    assert cells[0].get("y") == cells[1].get("y") != cells[2].get("y")
    texts = [t.text for t in picture.findall(f"{SVG}text")]
    assert [t for t in texts if t and t.startswith("round")] == ["round 2", "round 1"]
    assert [t for t in texts if t in ("a", "↵", "<&>", "\ufffd")] == ["a", "↵", "<&>", "\ufffd"]
    assert "4 tokens in 2 forwards: 2.0 tokens per forward" in texts


def test_long_prompts_are_cut_and_no_text_breaks_the_picture() -> None:
    picture = drawn("what <b>\x07 is\nthis? " * 30, result([1], Committed(0, (0,), (1,))))
    text = picture.findall(f"{SVG}text")[0].text
    assert text is not None and text.startswith("what <b>\ufffd is this?") and text.endswith(" ...") and len(text) == 110
