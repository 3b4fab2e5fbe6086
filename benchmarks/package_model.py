"""Puts a trained run into the package: bf16 weights, decoding defaults, and a model card with what was measured.

    python benchmarks/package_model.py runs/nano --name nano --method refusion [--limit 100]

With several runs the weights are their mean, taken in float32; the card tells of the first.
The accuracy is measured here, on the test split, with the weights as they are written.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import refusion
from refusion.evaluation.evaluate import evaluate
from refusion.evaluation.procedural import FAMILIES
from refusion.models.checkpoint import WEIGHTS, count_parameters, load_model, save_folder
from refusion.models.tokenizer import Tokenizer
from refusion.models.transformer import Transformer

CARD = """---
license: apache-2.0
---
# {name}

{what} It comes with the `refusion` package and knows the tasks of the procedural nano suite, nothing else.

* **Architecture:** {architecture}, {parameters:,} parameters, bf16.
* **Data:** {data}
* **Training:** {training}
* **Made by:** `refusion train recipes/{name}.toml`{more}

## Accuracy on the test split

{limit} tasks of each family, one setting for all: `refusion eval --model {name} --split test --limit {limit}`

{table}
"""


def mean(runs: list[Path]) -> Transformer:
    """The last model of the first run, with the mean of all runs' weights."""
    first, *others = [load_model(run / "last", "cpu", "float32") for run in runs]
    with torch.no_grad():
        for weights in zip(first.parameters(), *(other.parameters() for other in others), strict=True):
            weights[0].copy_(torch.stack(weights).mean(0))
    return first


def records(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Families as rows; for each way of decoding its accuracy and tokens per forward."""
    rows = ["| family | " + " | ".join(f"{name} | tokens per forward" for name in reports) + " |"]
    rows.append("|---|" + "---|---|" * len(reports))
    families = list(next(iter(reports.values()))["families"])
    for family in families:
        cells = [report["families"][family] for report in reports.values()]
        rows.append(f"| {family} | " + " | ".join(_cells(cell) for cell in cells) + " |")
    rows.append("| **all** | " + " | ".join(_cells(report) for report in reports.values()) + " |")
    return "\n".join(rows)


def _cells(entry: dict[str, Any]) -> str:
    return f"{entry['accuracy']:.2f} | {entry['tokens_per_forward']:.2f}"


def measure(model: refusion.Model, method: str, limit: int) -> dict[str, dict[str, Any]]:
    reports = {}
    if method == "refusion":
        reports["in slots"] = evaluate(model, split="test", limit=limit, config=refusion.DecodeConfig())
    reports["token by token"] = evaluate(model, split="test", limit=limit, config=refusion.AutoregressiveConfig())
    return reports


def weights(data: dict[str, Any]) -> str:
    """How the families are mixed, where they are not all alike."""
    given = data.get("family_weights")
    return "" if given is None else " times " + ", ".join(f"{w:g} ({f})" for f, w in zip(FAMILIES, given, strict=True))


def card(run: Path, name: str, method: str, more: str, model: refusion.Model, limit: int) -> str:
    recipe = json.loads((run / "recipe.json").read_text(encoding="utf-8"))
    data, training, steps = recipe["data"], recipe["training"], records(run)
    hours = sum(
        (later["tokens"] - earlier["tokens"]) / later["tokens_per_second"]
        for earlier, later in zip([{"tokens": 0}, *steps], steps, strict=False)
    )
    start = recipe["model"]["start"]
    what = "An autoregressive base model." if start is None else "A ReFusion model, converted from `nano-ar`."
    return CARD.format(
        name=name, what=what, architecture=model.folder.architecture, parameters=count_parameters(model.folder.model),
        data=f"the suite's training split, made by its generators (seed {data['seed']}, {data['rows_per_family']:,} tasks a "
        f"family{weights(data)}, {data['infill_fraction']:.0%} turned into infilling rows).",
        training=f"{steps[-1]['step']:,} steps of {training['batch_size']} rows, {steps[-1]['tokens'] / 1e6:.1f}M tokens, "
        f"{training['optimizer']}, seed {training['seed']}, {hours / 3600:.1f} hours on a CPU.",
        more=more, limit=limit, table=table(measure(model, method, limit)),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--name", required=True)
    parser.add_argument("--method", choices=("refusion", "autoregressive"), required=True)
    parser.add_argument("--setting", action="append", default=[], help="a decoding default, say slot_threshold=0.9")
    parser.add_argument("--more", default="", help="a sentence for the card, after the recipe's name")
    parser.add_argument("--limit", type=int, default=100)
    options = parser.parse_args()
    folder = WEIGHTS / options.name
    defaults: dict[str, Any] = {"method": options.method}
    defaults |= {key: json.loads(value) for key, _, value in (entry.partition("=") for entry in options.setting)}
    model, tokenizer = mean(options.runs), Tokenizer.from_folder(options.runs[0] / "last")
    save_folder(folder, model, tokenizer, defaults=defaults)
    text = card(options.runs[0], options.name, options.method, options.more, refusion.load(options.name, "cpu"), options.limit)
    save_folder(folder, model, tokenizer, defaults=defaults, extra_files={"README.md": text})
    print(text)


if __name__ == "__main__":
    main()
