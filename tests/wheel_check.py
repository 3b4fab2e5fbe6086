"""Run by `make wheel-test` in an environment that holds the wheel and nothing else: the command answers questions.

Not a pytest module: it needs no test tools, only the installed package and the standard library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from refusion.evaluation.procedural import FAMILIES, take

COMMAND = Path(sys.executable).parent / "refusion"


def answer(prompt: str) -> dict[str, object]:
    """What `refusion generate` says to a prompt, with the model that comes with the package."""
    command = [str(COMMAND), "generate", prompt, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def main() -> None:
    """One validation task of each family; most have to be right, or the weights did not come along whole."""
    right = 0
    for family in FAMILIES:
        (item,) = take(family, "validation", 1)
        result = answer(item.prompt)
        correct = item.check(str(result["text"]))
        right += correct
        print(f"{family:<12}{'right' if correct else 'wrong'}  {result['stats']}")
    if right < len(FAMILIES) - 2:
        sys.exit(f"only {right} of {len(FAMILIES)} answers are right")


if __name__ == "__main__":
    main()
