"""Draws docs/order.svg: one real generation, every token a cell, shaded by the round that wrote it.

python benchmarks/picture.py [--model nano] [--prompt TEXT] [--out docs/order.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import refusion
from refusion.evaluation.picture import order

PROMPT = "Write f(xs): keep those over 7, keep the even ones, add 8 to each, return the count."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--out", type=Path, default=Path("docs/order.svg"))
    options = parser.parse_args()
    model = refusion.load(options.model)
    result = model.generate(options.prompt, refusion.DecodeConfig())
    options.out.write_text(order(options.prompt, result, model.tokenizer.decode), encoding="utf-8")
    print(options.out, result.text)


if __name__ == "__main__":
    main()
