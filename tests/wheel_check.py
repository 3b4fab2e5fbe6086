"""Run by `make wheel-test` in an environment that holds the wheel and nothing else: the command answers questions.

Not a pytest module: it needs no test tools, only the installed package and the standard library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from refusion.evaluation.procedural import take

COMMAND = Path(sys.executable).parent / "refusion"


def answer(prompt: str) -> dict[str, object]:
    """What `refusion generate` says to a prompt, with the model that comes with the package."""
    command = [str(COMMAND), "generate", prompt, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def main() -> None:
    """Three validation tasks of the two families that nano knows best; most have to be right, or the weights did not come
    along whole."""
    items = [item for family in ("code", "sudoku") for item in take(family, "validation", 3)]
    right = 0
    for item in items:
        result = answer(item.prompt)
        correct = item.check(str(result["text"]))
        right += correct
        print(f"{item.family:<12}{'right' if correct else 'wrong'}  {result['stats']}")
    if right < 4:
        sys.exit(f"only {right} of {len(items)} answers are right")


if __name__ == "__main__":
    main()
