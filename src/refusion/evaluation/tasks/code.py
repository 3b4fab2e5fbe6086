"""HumanEval and MBPP: Python functions, judged by the published tests, run in the sandbox.

    humaneval   JSON Lines, gzipped: {"task_id", "prompt", "entry_point", "canonical_solution", "test"}; the tests are
                `check(candidate)`
    mbpp        JSON Lines, {"task_id", "text", "code", "test_list", "test_setup_code"}, or the sanitized JSON array, {"task_id",
                "prompt", "code", "test_list", "test_imports"}; the tests are assertions
"""

from __future__ import annotations

import re

from refusion.evaluation.sandbox import run_program
from refusion.evaluation.tasks.base import Item, Record, Task, Verdict

SECONDS = 10.0  # wall clock; the published harnesses give 3, which a busy machine may not keep
MBPP_TEST = range(11, 511)  # task ids of the published test split
FENCE = re.compile(r"```[ \t]*[\w+-]*[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)", re.S | re.M)
CODE_LINE = re.compile(r"^(?:(?:import|from|def|class|async)\b|@|\w+ *=[^=])", re.M)
INDENTED = re.compile(r"(?:[ \t]*\r?\n)*(?:\t| {2,})\S")
ENDS = re.compile(r"\n(?:class|def|#|if|print|@|```)|```")  # where the published harness ends a completion

HUMANEVAL_PROMPT = (
    "Complete the following Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}\n```"
)
MBPP_PROMPT = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n{tests}\n\n"
    "Answer with the code in one code block."
)


def block(text: str, name: str = "") -> str:
    """The code in an answer: the first fenced block that defines `name` (or anything, if no name is given), else the first
    block; without a fence, the text from its first line of code on. A block that is never closed goes to the end.

    >>> block("Here:\\n```python\\nx = 1\\n```\\nor\\n```\\ndef f(): pass\\n```"), block("Sure.\\nimport re\\ndef f(): pass")
    ('def f(): pass', 'import re\\ndef f(): pass')
    """
    blocks: list[str] = [content.rstrip() for content in FENCE.findall(text)]
    if blocks:
        return next((content for content in blocks if defines(content, name)), blocks[0])
    line = CODE_LINE.search(text)
    return text[line.start() :] if line else text


def defines(code: str, name: str) -> bool:
    """Whether code defines a function of this name at the outermost level; any function, if the name is empty."""
    named = re.escape(name) if name else r"\w+"
    return re.search(rf"^(?:async )?def\s+{named}\b", code, re.M) is not None


# --- HumanEval


def completed(prompt: str, response: str, name: str) -> str:
    """The program that a response makes of a prompt, without its tests.

    A response that begins with an indented line, without the whole function in a block, is the function's body: it is appended to
    the prompt, up to where the published harness ends it (a new definition, comment, `if` or `print` at the margin, or a fence).
    Else the code is taken from its block;
    if it defines the function, it follows what stands before the function in the prompt (imports, helpers); if it does not, it
    is a body, whose first line gets back the indentation that it may have lost.
    """
    code, fenced = block(response, name), "```" in response
    whole = defines(code, name)
    if INDENTED.match(response) and not (whole and fenced):
        return prompt + _ended(response)
    if whole:
        head = re.split(rf"^def\s+{re.escape(name)}\b", prompt, maxsplit=1, flags=re.M)[0]
        return head + code
    return prompt + _ended(code if code[:1].isspace() else "    " + code)


def _ended(completion: str) -> str:
    end = ENDS.search(completion)
    return completion[: end.start()] if end else completion


def _humaneval(record: Record, seed: int) -> Item:
    name, prompt = record.text("entry_point"), record.text("prompt")
    if not re.search(rf"^def\s+{re.escape(name)}\b", prompt, re.M):
        raise record.complaint(f"'prompt' must define the function {name!r}")
    facts = {"name": name, "prompt": prompt, "test": record.text("test")}
    gold = str(record.values.get("canonical_solution", ""))
    return Item(HUMANEVAL_PROMPT.format(prompt=prompt.rstrip()), gold, "", facts)


def _judge_humaneval(item: Item, response: str) -> Verdict:
    """Right if the program, the published tests and the call of them run to the end."""
    facts = item.facts
    code = completed(facts["prompt"], response, facts["name"])
    return _run(code, f"{code}\n\n{facts['test']}\n\ncheck({facts['name']})\n")


def _run(code: str, program: str) -> Verdict:
    outcome = run_program(program, seconds=SECONDS)
    return Verdict(code, outcome == "passed", "" if outcome == "passed" else outcome)


# --- MBPP


def _mbpp(record: Record, seed: int) -> Item:
    text, tests = record.text("text", "prompt").strip(), record.texts("test_list")
    if not tests:
        raise record.complaint("'test_list' must not be empty")
    imports = record.texts("test_imports") if "test_imports" in record.values else []
    setup = "\n".join([*imports, str(record.values.get("test_setup_code") or "")])
    facts = {"setup": setup, "tests": "\n".join(tests), "id": record.values.get("task_id")}
    return Item(MBPP_PROMPT.format(text=text, tests="\n".join(tests)), str(record.values.get("code", "")), "", facts)


def _judge_mbpp(item: Item, response: str) -> Verdict:
    """Right if the code, the set-up and all assertions run to the end. `[BEGIN]` and `[DONE]` of the published prompt are
    taken off."""
    text = response.partition("[DONE]")[0]
    code = block(text.rpartition("[BEGIN]")[2])
    return _run(code, f"{code}\n\n{item.facts['setup']}\n{item.facts['tests']}\n")


def _test_split(items: list[Item]) -> list[Item]:
    """The published test split, ids 11 to 510; of a file that has none of them, all."""
    return [item for item in items if item.facts["id"] in MBPP_TEST] or items


HUMANEVAL = Task(
    "humaneval", ("HumanEval.jsonl.gz", "HumanEval.jsonl", "data/HumanEval.jsonl.gz"),
    "HumanEval.jsonl.gz: JSON Lines with prompt, entry_point, test", "https://github.com/openai/human-eval",
    _humaneval, _judge_humaneval,
)  # fmt: skip
MBPP = Task(
    "mbpp", ("mbpp.jsonl", "sanitized-mbpp.json"), "mbpp.jsonl or sanitized-mbpp.json with text or prompt, code, test_list",
    "https://github.com/google-research/google-research/tree/master/mbpp", _mbpp, _judge_mbpp, _test_split,
)  # fmt: skip
