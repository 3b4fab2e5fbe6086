"""Pictures of training runs: what is drawn of what was logged, and logs and files that are not as they should be."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refusion.cli import main
from refusion.config import UserError
from refusion.training import plot
from refusion.training.plot import Curve, names, panels, picture, read, smooth

STEPS = [
    {"step": s, "loss": 7.0 - s / 10, "loss_ar": 2.0, "loss_mdm": 5.0 - s / 10, "gradient_norm": 1.0, "lr": 1e-3, "tokens": 100 * s,
     "tokens_per_second": 50.0}
    for s in range(2, 41, 2)
]  # fmt: skip
VALIDATIONS: list[dict[str, Any]] = [
    {"step": 20, "validation_loss_ar": 2.1, "validation_loss_mdm": 3.5},
    {"step": 40, "validation_loss_ar": 2.0, "validation_loss_mdm": 1.5, "accuracy": 0.5, "tokens_per_forward": 2.5,
     "accuracy_word": 0.25, "accuracy_list": 0.75, "accuracy_autoregressive": 0.6},
]  # fmt: skip


def logged(folder: Path, *records: Mapping[str, Any], tail: str = "") -> Path:
    """A run's folder with this log."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8")
    return folder


def titles(*folders: Path) -> list[str]:
    return [panel.title for panel in panels([read(folder) for folder in folders])]


def curves(title: str, *folders: Path, x: str = "steps") -> list[Curve]:
    return next(panel.curves for panel in panels([read(folder) for folder in folders], x) if panel.title == title)


def texts(svg: Path) -> list[str]:
    """What is written in a picture: as text, not as outlines."""
    return ["".join(element.itertext()).strip() for element in ET.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


# --- what is drawn


def test_examples_of_the_documentation_hold() -> None:
    result = doctest.testmod(plot)
    assert result.attempted > 2 and not result.failed


def test_there_is_a_panel_for_what_there_is_data_for(tmp_path: Path) -> None:
    whole = logged(tmp_path / "whole", *STEPS, *VALIDATIONS)
    assert titles(whole) == [
        "loss", "loss_ar", "loss_mdm", "accuracy", "accuracy by family", "tokens per forward", "learning rate", "tokens per second"
    ]  # fmt: skip
    part = logged(tmp_path / "part", {"step": 1, "loss": 1.0, "loss_nelbo": 1.0}, {"step": 2, "validation_loss_nelbo": 2.0})
    assert titles(part) == ["loss_nelbo"]  # the sum of one part is that part
    assert titles(logged(tmp_path / "sum", {"step": 1, "loss": 1.0, "lr": 0.1})) == ["loss", "learning rate"]
    assert "accuracy by family" not in titles(whole, part)
    assert {"loss", "loss_ar", "loss_mdm", "loss_nelbo"} <= set(titles(whole, part))


def test_curves_hold_what_was_logged(tmp_path: Path) -> None:
    whole = logged(tmp_path / "whole", *STEPS, *VALIDATIONS)
    training, validation = curves("loss_mdm", whole)
    assert (training.kind, validation.kind) == ("training", "validation")
    assert training.x.tolist() == [record["step"] for record in STEPS]
    assert training.y.tolist() == [record["loss_mdm"] for record in STEPS]
    assert (validation.x.tolist(), validation.y.tolist()) == ([20, 40], [3.5, 1.5])
    assert [(c.kind, c.y.tolist()) for c in curves("accuracy", whole)] == [("measured", [0.5]), ("token by token", [0.6])]
    assert [(c.label, c.y.tolist()) for c in curves("accuracy by family", whole)] == [("word", [0.25]), ("list", [0.75])]
    other = logged(tmp_path / "other", {"step": 1, "loss": 1.0, "lr": 0.5})
    assert [(c.number, c.y[0]) for c in curves("learning rate", whole, other)] == [(0, 1e-3), (1, 0.5)]


def test_validations_stand_where_they_belong_among_tokens(tmp_path: Path) -> None:
    run = logged(tmp_path / "run", *STEPS, {"step": 21, "validation_loss_ar": 2.0}, {"step": 1, "validation_loss_ar": 9.0})
    training, validation = curves("loss_ar", run, x="tokens")
    assert training.x.tolist() == [record["tokens"] for record in STEPS]
    assert (validation.x.tolist(), validation.y.tolist()) == ([100, 2100], [9.0, 2.0])


def test_what_was_logged_again_counts_as_it_was_last(tmp_path: Path) -> None:
    again = [{"step": step, "loss": value} for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (1, 10.0))]
    (curve,) = curves("loss", logged(tmp_path / "run", *again))
    assert (curve.x.tolist(), curve.y.tolist()) == ([1, 2, 3], [10.0, 20.0, 3.0])


def test_smoothing_keeps_the_level_and_takes_the_noise() -> None:
    assert smooth(np.full(1000, 3.0)) == pytest.approx(3.0)
    noise = np.random.default_rng(0).normal(size=1000)
    assert smooth(noise).std() < 0.3 * noise.std()
    assert smooth(np.arange(1000.0))[50:-50] == pytest.approx(np.arange(50.0, 950.0))  # it does not lag behind
    assert smooth(np.array([1.0, 9.0, 2.0])).tolist() == [1.0, 9.0, 2.0]


@pytest.mark.parametrize(("folders", "expected"), [
    (["runs/a", "runs/b"], ["a", "b"]), (["x/run", "y/run", "z"], ["x/run", "y/run", "z"]),
    (["x/1/run", "y/1/run", "y/2/run"], ["x/1/run", "y/1/run", "2/run"]), (["/a", "/b/a"], ["/a", "b/a"]), (["runs/a/"], ["a"]),
])  # fmt: skip
def test_names_are_the_shortest_paths_that_differ(folders: list[str], expected: list[str]) -> None:
    assert names([Path(folder) for folder in folders]) == expected


# --- the picture


def test_one_run_is_drawn_into_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = logged(tmp_path / "some-run", *STEPS, *VALIDATIONS)
    assert main(["plot", str(run)]) == 0
    assert capsys.readouterr() == (f"{run / 'plot.svg'}\n", "")
    assert sorted(os.listdir(run)) == ["metrics.jsonl", "plot.svg"]
    written = texts(run / "plot.svg")
    for text in ("some-run", "steps", "loss_mdm", "training, smoothed", "validation", "token by token", "word", "list"):
        assert text in written, text


def test_several_runs_are_drawn_into_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (logged(tmp_path / name / "_$run$", *STEPS, *VALIDATIONS) for name in ("a", "_b"))
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(one), str(other), "a/_$run$", "--x", "tokens"]) == 0
    assert capsys.readouterr().out == "plot.svg\n"
    written = texts(tmp_path / "plot.svg")
    assert written.count("a/_$run$") == written.count("_b/_$run$") == written.count("tokens") == 1


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")])
def test_the_suffix_says_what_file(suffix: str, start: bytes, tmp_path: Path) -> None:
    run, out = logged(tmp_path / "run", *STEPS), tmp_path / f"picture.{suffix}"
    assert main(["plot", str(run), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(start)


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_the_same_log_gives_the_same_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = panels([read(logged(tmp_path / "run", *STEPS, *VALIDATIONS))])
    first = picture(drawn, ["run"], "steps", kind)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")  # another day
    assert picture(drawn, ["run"], "steps", kind) == first


@pytest.mark.parametrize(("decades", "numbers"), [(0.5, {"4", "6", "8"}), (2, {"5", "2", "0.5", "0.2"}), (9, {"0.01", "1e-06"})])
def test_losses_over_decades_have_a_logarithmic_axis(decades: float, numbers: set[str], tmp_path: Path) -> None:
    run = logged(tmp_path / "run", *({"step": s, "loss": 10.0 ** (1 - s * decades / 100)} for s in range(101)))
    main(["plot", str(run)])
    assert numbers <= set(texts(run / "plot.svg"))


def test_what_no_typeface_has_and_no_line_can_hold(tmp_path: Path) -> None:
    run = logged(tmp_path / "訓練\n\x07", *STEPS)
    assert main(["plot", str(run)]) == 0
    assert "訓練\ufffd\ufffd" in texts(run / "plot.svg")


def test_neither_torch_nor_pyplot_is_needed_and_no_setting_stays(tmp_path: Path) -> None:
    run = logged(tmp_path / "run", *STEPS)
    code = (
        "import sys, matplotlib; from refusion.cli import main\n"
        "settings = lambda: {k: v for k, v in matplotlib.rcParams.copy().items() if k != 'backend'}\n"  # asking makes it choose
        "before = settings(); assert main(['plot', sys.argv[1]]) == 0 and settings() == before\n"
        "print(*{'torch', 'matplotlib.pyplot', 'tokenizers'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.split() == []


# --- logs and files that are not as they should be


@pytest.mark.parametrize(("tail", "note"), [
    ("", ""), ('{"step": 42, "lo', ""), ('{"step": 42, "loss": 1.0}', ""), ("\n\n", ""),
    ('{"step": 42, "lo\n', "left out 1 line that cannot be read"),
    ('{"st\n[1]\n{"loss": 1}\n{"step": -1}\n{"step": "x"}\n' + "[" * 100_000 + '\n{"st', "left out 6 lines that cannot"),
], ids=["whole", "cut", "no newline", "empty lines", "broken", "many broken"])  # fmt: skip
def test_lines_that_cannot_be_read(tail: str, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = logged(tmp_path / "run", *STEPS, tail=tail)
    assert main(["plot", str(run)]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"note: {run / 'metrics.jsonl'}: {note}") and err.count("\n") == 1 if note else err == ""
    assert curves("loss", run)[0].x[-1] == (42 if tail.endswith("1.0}") else 40)


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    odd = [float("nan"), float("inf"), None, "1", [1], 10**400]
    run = logged(tmp_path / "run", *({"step": s, "loss": value} for s, value in enumerate([*odd, 1.5])))
    assert [(c.x.tolist(), c.y.tolist()) for c in curves("loss", run)] == [([6], [1.5])]
    assert main(["plot", str(run)]) == 0


@pytest.mark.parametrize(("content", "message"), [
    ("", "holds nothing to plot yet"), ('{"step": 1, "gradient_norm": 2.0}\n', "holds nothing to plot yet"),
    ('{"step": 1, "loss": NaN}\n', "holds nothing to plot yet"), ("x\ny\n", "holds nothing to plot"),
])  # fmt: skip
def test_a_log_with_nothing_to_plot(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, run = logged(tmp_path / "good", *STEPS), logged(tmp_path / "run", tail=content)
    assert main(["plot", str(good), str(run), "--out", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr() == ("", f"error: {run / 'metrics.jsonl'} {message}\n")
    assert not (tmp_path / "x.svg").exists()


def test_tokens_that_were_not_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = logged(tmp_path / "run", {"step": 1, "loss": 1.0})
    assert main(["plot", str(run), "--x", "tokens"]) == 2
    assert capsys.readouterr().err == f"error: {run / 'metrics.jsonl'} has no tokens; --x steps is possible\n"


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = logged(tmp_path / "run", *STEPS), tmp_path / "x.svg"
    out.write_text("before")

    def full(self: Path, content: bytes) -> int:
        with open(self, "wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match=r"x\.svg: cannot be written \(No space left on device\)"):
            plot.plot([run], out)
    assert out.read_text() == "before"
    (tmp_path / "folder.png").mkdir()
    for place in (tmp_path / "folder.png", tmp_path / "missing" / "x.png"):
        with pytest.raises(UserError, match="cannot be written"):
            plot.plot([run], place)
    assert sorted(os.listdir(tmp_path)) == ["folder.png", "run", "x.svg"]


def test_without_matplotlib_the_complaint_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = logged(tmp_path / "run", *STEPS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(run)]) == 2
    assert capsys.readouterr().err == "error: pictures need matplotlib: pip install 'refusion[report]'\n"
