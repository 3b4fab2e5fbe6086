"""Pictures of training runs: losses, accuracy, learning rate and speed as they were logged (extra `[report]`: matplotlib).

Contract: reads metrics.jsonl alone, also while a run is writing it, and does not need torch. The same metrics and the same
matplotlib give the same SVG, byte for byte.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refusion.config import UserError

Values = NDArray[np.float64]

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")
STROKES = ("-", "--", "-.", ":")  # another one when the colours are used up
WIDTH, HEIGHT, LINE = 5.2, 2.9, 0.24  # inches: a panel, a line of the legend
MOST_POINTS = 2000  # of a line; of longer ones every n-th point is drawn
MOST_NAME, MOST_LEGEND = 72, 112  # characters: of a run's name, of a line of the legend
KINDS = {  # how a curve is drawn, and what it is in a legend
    "training": "training, smoothed", "validation": "validation", "measured": "by the run's method",
    "token by token": "token by token", "plain": "",
}  # fmt: skip
STYLE: Any = {  # settings of matplotlib
    "svg.hashsalt": "refusion", "svg.fonttype": "none", "pdf.fonttype": 42, "text.usetex": False, "text.parse_math": False,
    "font.family": ["sans-serif"], "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left",
    "axes.titleweight": "bold", "axes.titlecolor": "#333333", "text.color": "#333333", "axes.labelcolor": "#666666",
    "xtick.color": "#666666", "ytick.color": "#666666", "axes.edgecolor": "#bbbbbb", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.8,
    "xtick.major.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0, "legend.frameon": False,
    "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.1,
}  # fmt: skip


# --- what was logged


@dataclass(frozen=True)
class Metrics:
    """What a run has logged, by name: step -> value, by rising step. Values that are not finite are left out."""

    path: Path
    series: Mapping[str, Mapping[int, float]]
    broken: int = 0  # lines that cannot be read; a last line that is cut short is that of a run that goes on

    @property
    def losses(self) -> list[str]:
        """Names of the losses; the sum is left out where it has one part."""
        names = {name.removeprefix("validation_") for name in self.series}
        parts = sorted(name for name in names if name.startswith("loss_"))
        return ["loss", *parts] if "loss" in names and len(parts) != 1 else parts

    def points(self, name: str, x: str) -> tuple[Values, Values]:
        """Values of a name over "steps" or "tokens"; validations, which log no tokens, stand between their neighbours."""
        steps, values = np.array(list(self.series[name])), np.array(list(self.series[name].values()))
        if x == "steps":
            return steps.astype(float), values
        tokens = self.series["tokens"]
        return np.interp(steps, [0, *tokens], [0, *tokens.values()]), values


def read(folder: Path) -> Metrics:
    """The metrics of a run's folder. Raises `UserError` when it has none, or none that can be drawn."""
    path = folder / "metrics.jsonl"
    if not folder.is_dir():
        what = "is a file, not the folder of a run" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{folder} is not the folder of a run: it has no metrics.jsonl") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    metrics = _parsed(path, content)
    if not panels([metrics]):
        raise UserError(f"{path} holds nothing to plot" + ("" if metrics.broken else " yet"))
    return metrics


def _parsed(path: Path, content: bytes) -> Metrics:
    series: dict[str, dict[int, float]] = {}
    *lines, last = content.split(b"\n")
    records = [_record(line) for line in lines if line.strip()]
    broken = records.count(None)
    for record in (*records, _record(last)):
        step = int(record.pop("step")) if record else 0
        for name, value in (record or {}).items():
            series.setdefault(name, {})[step] = value  # a step that was logged again counts as it was last
    return Metrics(path, {name: dict(sorted(values.items())) for name, values in series.items()}, broken)


def _record(line: bytes) -> dict[str, float] | None:
    """The numbers of a line; None if it is no line of metrics.jsonl."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or not 0 <= step < 2**53:
        return None
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float) and abs(v) < 1e300}


def names(folders: Sequence[Path]) -> list[str]:
    """The ends of the folders' paths that tell them apart, as short as can be.

    >>> names([Path("/runs/a/last"), Path("/runs/b/last"), Path("/runs/c")])
    ['a/last', 'b/last', 'c']
    """
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]

    def name(own: tuple[str, ...]) -> str:
        for n in range(1, len(own)):
            if sum(other[-n:] == own[-n:] for other in parts) == 1:
                return str(Path(*own[-n:]))
        return str(Path(*own))

    return [name(own) for own in parts]


# --- what is drawn


@dataclass(frozen=True)
class Curve:
    """A line of a panel. kind: how it is drawn (`KINDS`). number: that of its run, or of its label, where it has one."""

    x: Values
    y: Values
    kind: str
    number: int
    label: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    curves: list[Curve]
    limits: tuple[float | None, float | None] = (None, None)  # of the values; None: where they end


def panels(runs: Sequence[Metrics], x: str = "steps") -> list[Panel]:
    """The panels for which there is data. Families of tasks have one if there is one run."""

    def curves(**kinds: str) -> list[Curve]:
        wanted = [(number, run, name) for number, run in enumerate(runs) for name in kinds if name in run.series]
        return [Curve(*run.points(name, x), kinds[name], number) for number, run, name in wanted]

    losses = sorted({name for run in runs for name in run.losses})
    accuracies = {"accuracy": "measured", "accuracy_autoregressive": "token by token"}
    families = [name for name in runs[0].series if name.startswith("accuracy_") and name not in accuracies]
    made = [
        *(Panel(name, curves(**{name: "training", f"validation_{name}": "validation"})) for name in losses),
        Panel("accuracy", curves(**accuracies), (0, 1.02)),
        Panel("accuracy by family", [
            Curve(*runs[0].points(name, x), "measured", number, name.removeprefix("accuracy_"))
            for number, name in enumerate(families) if len(runs) == 1
        ], (0, 1.02)),
        Panel("tokens per forward", curves(tokens_per_forward="measured"), (0, None)),
        Panel("learning rate", curves(lr="plain"), (0, None)),
        Panel("tokens per second", curves(tokens_per_second="training"), (0, None)),
    ]  # fmt: skip
    return [panel for panel in made if panel.curves]


def smooth(values: Values) -> Values:
    """Means of means over a sixtieth of the values to either side; near the ends, over those that there are. Fewer than ten
    stay as they are.

    >>> smooth(np.array([0.0] * 5 + [9.0] + [0.0] * 5)).tolist()
    [0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0]
    """
    if len(values) < 10:
        return values
    half, places = -(-len(values) // 60), np.arange(len(values))
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    for _ in range(2):
        sums = np.concatenate([[0.0], np.cumsum(values)])
        values = (sums[last] - sums[first]) / (last - first)
    return values


# --- the picture


def check_suffix(out: Path) -> None:
    """Raises `UserError` for a file that is not drawn here."""
    if out.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out {out}: must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def plot(folders: Sequence[Path], out: Path | None = None, x: str = "steps") -> Path:
    """Draw runs over "steps" or "tokens" into one file, and return its path; the suffix says what file.

    out: default plot.svg, in the folder of a single run, in the working directory for several. It is written whole or not at
    all. Lines that cannot be read are counted in a note on stderr.
    Raises `UserError` without matplotlib, and when there is nothing to draw or the file cannot be written.
    """
    folders = list({os.path.abspath(folder): folder for folder in folders}.values())
    if out is None:
        out = folders[0] / "plot.svg" if len(folders) == 1 else Path("plot.svg")
    check_suffix(out)
    runs = [read(folder) for folder in folders]
    for run in runs:
        if x == "tokens" and "tokens" not in run.series:
            raise UserError(f"{run.path} has no tokens; --x steps is possible")
        if run.broken:
            lines = "1 line" if run.broken == 1 else f"{run.broken:,} lines"
            print(f"note: {run.path}: left out {lines} that cannot be read", file=sys.stderr)
    _write(out, picture(panels(runs, x), names(folders), x, out.suffix.lower()[1:]))
    return out


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            part.write_bytes(content)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def picture(drawn: Sequence[Panel], runs: Sequence[str], x: str, kind: str) -> bytes:
    """Panels as one file, kind "png", "svg" or "pdf", with the runs' names in its legend. pyplot is not involved."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'refusion[report]'") from None
    runs = [_printable(name) for name in runs]
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    columns, out = min(2, len(drawn)), io.BytesIO()
    rows = -(-len(drawn) // columns)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # that the typeface lacks: a box is drawn for it
        figure = Figure(layout="constrained")
        lines = _draw_names(figure, runs, MOST_LEGEND * columns // 2)
        figure.set_size_inches(WIDTH * columns, HEIGHT * rows + LINE * lines)
        longest = max(curve.x[-1] for panel in drawn for curve in panel.curves)
        for number, panel in enumerate(drawn):
            axes = figure.add_subplot(rows, columns, number + 1)
            _draw_panel(axes, panel, single=len(runs) == 1)
            axes.set_xlim(0, 1.015 * longest or 1)
        figure.supxlabel(x, size=10, color=STYLE["axes.labelcolor"])
        title = f"Training of {', '.join(runs)}"
        figure.savefig(out, format=kind, dpi=150, metadata={"Title": title, **dates.get(kind, {})})
    return out.getvalue()


def _draw_names(figure: Any, runs: Sequence[str], width: int) -> int:
    """The name of one run, or a legend of several, at most `width` characters wide. Returns how many lines it takes."""
    if len(runs) == 1:
        figure.suptitle(runs[0], x=0.01, ha="left", size=13, weight="bold")
        return 1
    columns = max(1, min(len(runs), width // (max(map(len, runs)) + 8)))
    by_row = [number for column in range(columns) for number in range(column, len(runs), columns)]
    looks = [{"color": _colour(number), "linestyle": _stroke(number), "linewidth": 2.5} for number in by_row]
    _legend(figure, [runs[number] for number in by_row], looks, loc="outside upper left", ncols=columns, handlelength=2.8)
    return -(-len(runs) // columns)


def _legend(place: Any, texts: Sequence[str], looks: Sequence[dict[str, Any]], **where: Any) -> None:
    """A legend of a figure or of a panel. Older matplotlib leaves out labels that begin with "_": they are set later."""
    from matplotlib.lines import Line2D

    legend = place.legend([Line2D([], [], **look) for look in looks], ["x"] * len(looks), **where)
    for shown, text in zip(legend.get_texts(), texts, strict=True):
        shown.set_text(text)


def _draw_panel(axes: Any, panel: Panel, *, single: bool) -> None:
    axes.set_title(panel.title)
    for curve in panel.curves:
        _draw(axes, curve, single)
    if panel.limits != (None, None):
        axes.set_ylim(*panel.limits)
    elif _spans_decades([curve.y for curve in panel.curves]):
        _make_logarithmic(axes)
    axes.xaxis.get_major_locator().set_params(integer=True, steps=[1, 2, 5, 10])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _, axis=axis: _short(value, axis.get_view_interval()[1]))
    _draw_key(axes, panel, single)


def _make_logarithmic(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12) if high < 10_000 * low else LogLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_key(axes: Any, panel: Panel, single: bool) -> None:
    """In a panel with labels, what they are; in one with curves of two kinds, how to tell them apart."""
    labels = [
        (curve.label, {**_look(curve.kind, _colour(curve.number)), "linestyle": _stroke(curve.number)})
        for curve in panel.curves if curve.label
    ]  # fmt: skip
    kinds = [kind for kind in KINDS if any(curve.kind == kind for curve in panel.curves)]
    if len(kinds) > 1:
        labels = [(KINDS[kind], _look(kind, _colour(n) if single else "#888888")) for n, kind in enumerate(kinds)]
    if labels:
        texts, looks = zip(*labels, strict=True)
        place = "upper right" if "training" in kinds else "best"
        _legend(axes, texts, looks, loc=place, ncols=1 + (len(labels) > 3), fontsize=9, frameon=True, edgecolor="none")


def _short(value: float, most: float) -> str:
    """A number on an axis that goes up to `most`.

    >>> [_short(0, 1), _short(0.0005, 0.002), _short(2500, 6000), _short(2500, 60_000), _short(1_500_000, 4e6)]
    ['0', '0.0005', '2,500', '2.5k', '1.5M']
    """
    for size, sign in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if most >= max(size, 20_000):
            return f"{value / size:g}{sign}" if value else "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _draw(axes: Any, curve: Curve, single: bool) -> None:
    """A line, with points where it was measured now and then. Training: smoothed, over a faint line of all values."""
    apart = single and curve.kind in ("validation", "token by token")  # runs differ in colour; of one, the kinds do
    look = {"linestyle": _stroke(curve.number), **_look(curve.kind, _colour(curve.number + apart))}
    every = -(-len(curve.x) // MOST_POINTS)
    x, y = curve.x[::every], curve.y[::every]
    if curve.kind == "training":
        axes.plot(x, y, color=look["color"], linewidth=0.8, alpha=0.25)
        y = smooth(curve.y)[::every]
    if len(x) == 1:  # of a point there is no line
        look["marker"] = "o"
    axes.plot(x, y, **look)


def _look(kind: str, colour: str) -> dict[str, Any]:
    """How lines of a kind are drawn."""
    if kind in ("training", "plain"):
        return {"color": colour, "linewidth": 1.6}
    rim = {"markerfacecolor": "white", "markeredgecolor": colour} if kind == "token by token" else {"markeredgecolor": "white"}
    return {"color": colour, "linewidth": 1.2, "marker": "o", "markersize": 5, "markeredgewidth": 0.8, **rim, "zorder": 3}


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _stroke(number: int) -> str:
    return STROKES[number // len(COLOURS) % len(STROKES)]


def _printable(name: str) -> str:
    """A name on one line of bearable length."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in name)
    return text if len(text) <= MOST_NAME else "..." + text[3 - MOST_NAME :]


def _spans_decades(values: Sequence[Values]) -> bool:
    """Whether a logarithmic axis shows more: values over 0, the smoothed ones over more than a factor of ten."""
    smoothed = [smooth(one) for one in values]
    low, high = min((one.min() for one in smoothed), default=0), max((one.max() for one in smoothed), default=0)
    return bool(low > 0 and high > 10 * low)
