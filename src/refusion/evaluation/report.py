"""The report of a comparison: Markdown, and one self-contained HTML page, with pictures (extra `[report]`: matplotlib).

Contract: a pure function of the table that `reproduce` makes: {"name", "rows": [...]}, each row a method at one setting
("chosen": the one that was most accurate in validation). Measures nothing.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refusion.config import UserError

Row = Mapping[str, Any]
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#666666")


def front(rows: Sequence[Any], x: str = "tokens_per_second", y: str = "accuracy") -> list[Any]:
    """The rows that no other row beats in one of `x`, `y` without losing in the other, by rising x.

    >>> front([{"x": 1, "y": 3}, {"x": 2, "y": 2}, {"x": 1, "y": 2}, {"x": 3, "y": 2}], "x", "y")
    [{'x': 1, 'y': 3}, {'x': 3, 'y': 2}]
    """
    best: list[Any] = []
    for row in sorted(rows, key=lambda r: (-r[x], -r[y])):
        if not best or row[y] > best[-1][y]:
            best.append(row)
    return best[::-1]


def area(rows: Sequence[Row], x: str = "tokens_per_second", y: str = "accuracy") -> float:
    """Area under the front: accuracy summed over speed, from 0 to the fastest setting (each speed counts with the best accuracy
    that is to be had at it or faster).

    >>> area([{"x": 10, "y": 0.5}, {"x": 4, "y": 1.0}], "x", "y")
    7.0
    """
    total, before = 0.0, 0.0
    for row in front(rows, x, y):
        total += (row[x] - before) * row[y]
        before = row[x]
    return total


def write(table: Mapping[str, Any], folder: Path, orders: Mapping[str, str] | None = None) -> None:
    """`report.md`, `report.html` and the pictures as SVG into `folder`. Raises `UserError` without matplotlib.

    orders: pictures of answers as SVG (`picture.order`), by family.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in table["rows"] if not row["group"]]
    pictures = {"plane": plane(rows), "families": families(rows)}
    pictures |= {f"order-{family}": svg.encode() for family, svg in (orders or {}).items()}
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_bytes(picture)
    (folder / "report.md").write_text(markdown(table, list(orders or {})), encoding="utf-8")
    (folder / "report.html").write_text(page(table, pictures), encoding="utf-8")


# --- tables

HEAD = ("method", "accuracy", "tokens/forward", "rows/token", "tokens/s", "speed-up", "area", "settings")


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """One line of text cells for every chosen row."""
    base = next((row["tokens_per_second"] for row in rows if row["method"] == "autoregressive" and row["chosen"]), None)
    out: list[tuple[str, ...]] = []
    for row in rows:
        if row["chosen"]:
            own = [r for r in rows if r["entry"] == row["entry"]]
            low, high = row.get("tokens_per_second_interval", (row["tokens_per_second"],) * 2)
            given = ", ".join(f"{k} {v}" for k, v in row["given"].items())
            out.append((
                row["entry"], f"{row['accuracy']:.3f} ± {row['stderr']:.3f}", f"{row['tokens_per_forward']:.2f}",
                f"{row['rows_per_token']:.1f}" if "rows_per_token" in row else "",
                f"{row['tokens_per_second']:,.0f} ({low:,.0f}-{high:,.0f})",
                f"{row['tokens_per_second'] / base:.2f}" if base else "", f"{area(own):,.0f}", given,
            ))  # fmt: skip
    return out


def _ablation_lines(table: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Each setting that was changed, beside the chosen one."""
    return [
        (
            row["of"], row["name"], f"{row['accuracy']:.3f} ± {row['stderr']:.3f}", f"{row['tokens_per_forward']:.2f}",
            f"{row['rows_per_token']:.1f}", f"{row['tokens_per_second']:,.0f}",
        )
        for row in table.get("ablations", [])
    ]  # fmt: skip


ABLATION_HEAD = ("method", "changed", "accuracy", "tokens/forward", "rows/token", "tokens/s")


def _family_names(rows: Sequence[Row]) -> list[str]:
    return list(rows[0]["families"])


def _family_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    names = _family_names(rows)
    return [(row["entry"], *(f"{row['families'][n]['accuracy']:.2f}" for n in names)) for row in rows if row["chosen"]]


ORDER_NOTE = "The first task of some families, at the chosen setting. A row is a slot, its colour the round that wrote it."


def _note(table: Mapping[str, Any]) -> str:
    first = table["rows"][0]
    return (
        f"{first['n']} tasks of the test split. Every method went on from the same base for {first['train_tokens']:,} tokens of "
        "prompts and answers, on the same rows. Settings were searched on the validation split; each line is the one that was "
        "most accurate there. Times: all in turn on the same prompts; in brackets the 95% interval over prompts. Area: accuracy "
        "summed over tokens/s along the front of all settings that were measured on the test split."
    )


def markdown(table: Mapping[str, Any], orders: Sequence[str] = ()) -> str:
    """The report; `orders` are the families of which there is a picture."""

    def rendered(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
        rows = [head, ["---"] * len(head), *body]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    rows = [row for row in table["rows"] if not row["group"]]
    trained = [row for row in table["rows"] if row["group"]]
    return "\n".join([
        f"# {table['name']}: the comparison", "", rendered(HEAD, lines(rows)), "", _note(table), "",
        "![accuracy and speed](plane.svg)", "", "## By family", "",
        rendered(("method", *_family_names(rows)), _family_lines(rows)), "", "![by family](families.svg)", "",
        *(["## The order of the slots", "", ORDER_NOTE, ""] if orders else []),
        *(f"![{family}](order-{family}.svg)\n" for family in orders),
        *(["## Ablations of training", "", rendered(HEAD, lines(trained)), ""] if trained else []),
        *(["## Ablations of decoding", "", rendered(ABLATION_HEAD, _ablation_lines(table)), ""] if table.get("ablations") else []),
    ])  # fmt: skip


STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #8884; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
.wide { overflow-x: auto; }
"""


def page(table: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The report as one HTML page that needs nothing else."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    def rendered(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
        return f'<div class="wide"><table>{cells("th", head)}{"".join(cells("td", row) for row in body)}</table></div>'

    def image(name: str, text: str) -> str:
        return f'<img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{base64.b64encode(pictures[name]).decode()}">'

    rows = [row for row in table["rows"] if not row["group"]]
    trained = [row for row in table["rows"] if row["group"]]
    more = f"<h2>Ablations of training</h2>{rendered(HEAD, lines(trained))}" if trained else ""
    if table.get("ablations"):
        more += f"<h2>Ablations of decoding</h2>{rendered(ABLATION_HEAD, _ablation_lines(table))}"
    orders = [name for name in pictures if name.startswith("order-")]
    if orders:
        shown = "".join(f"<p>{image(name, 'Slots in the order in which they were written')}</p>" for name in orders)
        more = f"<h2>The order of the slots</h2><p>{ORDER_NOTE}</p>{shown}{more}"
    title = html.escape(f"{table['name']}: the comparison")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
        f"{rendered(HEAD, lines(rows))}<p>{html.escape(_note(table))}</p>"
        f"<h2>Accuracy and speed</h2>{image('plane', 'Accuracy against tokens a second, each method with its front')}"
        f"<h2>By family</h2>{rendered(('method', *_family_names(rows)), _family_lines(rows))}"
        f"{image('families', 'Accuracy of each method by family')}{more}</html>\n"
    )


# --- pictures


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'refusion[report]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def plane(rows: Sequence[Row]) -> bytes:
    """Accuracy against tokens a second (log), every method with its front, as SVG."""
    figure = _figure(8, 4.5)
    axes = figure.add_subplot()
    for colour, entry in zip(COLOURS * 9, dict.fromkeys(row["entry"] for row in rows), strict=False):
        own = front([row for row in rows if row["entry"] == entry])
        axes.plot([r["tokens_per_second"] for r in own], [r["accuracy"] for r in own], "o-", color=colour, label=entry)
    axes.set(xscale="log", ylim=(0, 1.02), xlabel="tokens a second", ylabel="accuracy")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _svg(figure)


def families(rows: Sequence[Row]) -> bytes:
    """Bars of accuracy by family for every chosen row, as SVG."""
    chosen, names = [row for row in rows if row["chosen"]], _family_names(rows)
    figure = _figure(8, 3.5)
    axes, width = figure.add_subplot(), 0.8 / len(chosen)
    for i, (colour, row) in enumerate(zip(COLOURS * 9, chosen, strict=False)):
        places = [n + (i - (len(chosen) - 1) / 2) * width for n in range(len(names))]
        axes.bar(places, [row["families"][name]["accuracy"] for name in names], width, color=colour, label=row["entry"])
    axes.set_xticks(range(len(names)), names)
    axes.set(ylim=(0, 1.02), ylabel="accuracy")
    axes.legend(frameon=False, ncols=min(5, len(chosen)), loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return _svg(figure)
