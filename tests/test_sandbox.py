"""Code that a model wrote: whatever it does, the answer is honest or None, and comes soon."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from refusion.evaluation.sandbox import run_function

POSIX = "import typing\nposix = typing.sys.modules['posix']\n"  # a way around the offered imports


def answer(code: str, *arguments: Any, seconds: float = 5.0) -> Any:
    results = run_function(code, "f", [list(arguments)], seconds=seconds)
    return None if results is None else results[0]


def test_results_of_all_calls_in_order() -> None:
    code = "def f(xs, n):\n    return [x * n for x in xs]"
    assert run_function(code, "f", [[[1, 2], 3], [[], 1], [[5], 0]]) == [[3, 6], [], [0]]
    assert run_function(code, "f", []) == []


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("None", None), ("True", True), ("7", 7), ("-2.5", -2.5), ("1e999", float("inf")), ("(1, (2,))", [1, [2]]),
        ("'é\\n\"\\\\'", 'é\n"\\'), ("{'a': [1]}", {"a": [1]}), ("2 ** 100", 2**100), ("'x' * 100_000", "x" * 100_000),
    ],
)  # fmt: skip
def test_json_values_come_back_as_they_are(expression: str, value: Any) -> None:
    results = run_function(f"def f():\n    return {expression}", "f", [[]])
    assert results is not None and results == [value] and type(results[0]) is type(value)


def test_pure_modules_can_be_imported() -> None:
    code = (
        "from __future__ import annotations\nfrom typing import List\n"
        "from collections import Counter, namedtuple\nimport math, re\nPair = namedtuple('Pair', 'a b')\n"
        "def f(xs: List[int]): return [math.gcd(*xs), dict(Counter('aab')), Pair(1, 2).b, re.sub('a', 'b', 'aa')]"
    )
    assert answer(code, [4, 6]) == [2, {"a": 2, "b": 1}, 2, "bb"]


BROKEN = {
    "syntax": "def f(:",
    "no function": "def g(): return 1",
    "not callable": "f = 3",
    "wrong arguments": "def f(a): return 1",
    "error": "def f(): raise ValueError",
    "error at import": "1 / 0\ndef f(): return 1",
    "null byte": "def f(): return 1\0",
    "exit": "import sys\ndef f(): return 1",
    "SystemExit": "def f(): raise SystemExit(0)",
    "exit at import": "raise SystemExit(0)",
    "KeyboardInterrupt": "def f(): raise KeyboardInterrupt",
    "deep recursion": "def f(): return f()",
    "set": "def f(): return {1, 2}",
    "bytes": "def f(): return b'1'",
    "object": "def f(): return object()",
    "function": "def f(): return f",
    "keys that are no strings": "def f(): return {1: 2}",
    "its own integer": "class I(int):\n    def __repr__(self): return '9'\ndef f(): return I(3)",
    "its own list": "class L(list):\n    def __iter__(self): return iter([9])\ndef f(): return L([3])",
    "a list in itself": "x = []\nx.append(x)\ndef f(): return x",
    "deep list": "def f():\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    "much too long": "def f(): return 'x' * 2_000_000",
    "very long integer": "def f(): return 10 ** 10_000",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_fails_is_none(name: str) -> None:
    assert answer(BROKEN[name]) is None


FORBIDDEN = {
    "import os": "import os\ndef f(): return 1",
    "import subprocess": "import subprocess\ndef f(): return 1",
    "import socket": "import socket\ndef f(): return 1",
    "import ctypes": "import ctypes\ndef f(): return 1",
    "importlib": "def f(): return str(__import__('importlib'))",
    "import from disk": "import typing\ndef f(): return str(typing.sys.modules['builtins'].__import__('socket'))",
    "open": "def f(): return open('/etc/hostname').read()",
    "write": "def f(): return open('MARK', 'w').write('x')",
    "os.open": POSIX + "def f(): return posix.open('MARK', posix.O_CREAT | posix.O_WRONLY)",
    "os.system": POSIX + "def f(): return posix.system('true')",
    "exec": POSIX + "def f(): return posix.execv('/bin/true', ['true'])",
    "fork": POSIX + "def f(): return posix.fork()",
    "fork bomb": POSIX + "def f():\n    while True:\n        posix.fork()",
    "kill the parent": POSIX + "def f(): return posix.kill(posix.getppid(), 9)",
    "list a folder": POSIX + "def f(): return posix.listdir('/')",
    "remove": POSIX + "def f(): return posix.remove('MARK')",
    "limits": "import typing\nr = typing.sys.modules['resource']\ndef f(): return r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "frames": "import typing\ndef f(): return len(typing.sys._getframe(1).f_locals)",
    "frames of an error": "def f():\n  try: 1 / 0\n  except Exception as e: return str(e.__traceback__.tb_frame)",
    "frames of a tracer": "import typing\ndef f(): return typing.sys.settrace(lambda *a: None)",
    "exit quietly": POSIX + "def f(): posix._exit(0)",
    "crash": POSIX + "def f(): posix.abort()",
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_forbidden_is_none(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert answer(FORBIDDEN[name].replace("MARK", str(mark))) is None
    assert not mark.exists()


def test_a_refusal_that_is_caught_has_no_effect(tmp_path: Path) -> None:
    code = "def f(path):\n    try:\n        open(path, 'w')\n    except Exception:\n        return 'refused'"
    assert answer(code, str(tmp_path / "mark")) == "refused"
    assert not list(tmp_path.iterdir())


LOOPS = {
    "loop": "def f():\n    while True: pass",
    "loop at import": "while True: pass",
    "loop in an except": "def f():\n    while True:\n        try: f()\n        except BaseException: pass",
    "printing": "def f():\n    while True: print('x' * 10_000)",
    "flood of a descriptor": POSIX + "def f():\n    while True: posix.write(1, b'x' * 100_000)",
    "huge number": "def f(): return len(str(3 ** (10 ** 8)))",
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_does_not_end_is_stopped(name: str) -> None:
    began = time.monotonic()
    assert answer(LOOPS[name], seconds=0.4) is None
    assert time.monotonic() - began < 2.0


def test_a_flood_of_results_is_stopped_long_before_the_time_is_up() -> None:
    began = time.monotonic()
    write = "for fd in range(3, 1000):\n      try: posix.write(fd, b'x' * 100_000)\n      except OSError: pass"
    flood = f"{POSIX}def f():\n  while True:\n    {write}"
    assert answer(flood, seconds=240) is None
    assert time.monotonic() - began < 120  # by its size; on a busy machine it takes a while to write it


@pytest.mark.parametrize("expression", ["'x' * (1 << 30)", "[0] * (1 << 28)", "list(range(1 << 30))"])
def test_memory_is_limited(expression: str) -> None:
    assert answer(f"def f(): return len({expression})", seconds=10) is None


def test_printing_and_closing_stdout_change_nothing() -> None:
    body = ("print('[9]')", "typing.sys.stdout.close()", "for fd in (0, 1, 2): posix.close(fd)", "return 5")
    assert answer("\n    ".join([POSIX + "def f():", *body])) == 5


FORGERIES = {
    "json": "import typing\nj = typing.sys.modules['json']\nj.dumps = lambda *a, **k: '[9]'\nj.JSONEncoder.encode = j.dumps\n",
    "builtins": "import typing\nb = typing.sys.modules['builtins']\nb.repr = b.str = lambda x: '9'\nb.type = lambda x: str\n",
    "own builtins": "__builtins__['repr'] = lambda x: '9'\n",
    "main": "import typing\nfor m in list(typing.sys.modules.values()):\n    m.results = m.text = [9]\n",
    "the word is not known": POSIX + "for fd in range(3, 20):\n    try: posix.write(fd, b'[9]')\n    except OSError: pass\n",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_results_cannot_be_forged(name: str) -> None:
    results = run_function(FORGERIES[name] + "def f(): return 5", "f", [[]])
    assert results == [5] or results is None
    if name not in ("main", "the word is not known"):
        assert results == [5]


def test_earlier_results_cannot_be_changed_later() -> None:
    code = "kept = []\ndef f(n):\n    kept.append(n)\n    if n == 3: kept[:] = [9]\n    return kept"
    assert run_function(code, "f", [[1], [2], [3]]) == [[1], [1, 2], [9]]


def test_nothing_stays_behind() -> None:
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    for code in ("def f(): return 1", "def f(): return f()", "def f(:"):
        answer(code)
    after = set(os.listdir("/proc/self/fd")) if before else set()
    assert before == after
    with contextlib.suppress(ChildProcessError):  # no children at all
        assert os.waitpid(-1, os.WNOHANG) == (0, 0)  # none that has ended and was not waited for


@pytest.mark.slow
def test_memory_of_this_process_is_safe_from_floods() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer(LOOPS["flood of a descriptor"], seconds=5)
    answer(LOOPS["printing"], seconds=5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes
