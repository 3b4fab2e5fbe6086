"""Whole programs with their tests in the sandbox: passed, or why not; and nothing outside is touched or read."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from refusion.evaluation.sandbox import run_function, run_program


def test_a_program_that_comes_to_its_end_passes() -> None:
    assert run_program("def f(x):\n    return x + 1\nassert f(1) == 2") == "passed"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("assert 1 == 2", "AssertionError"), ("assert 1 == 2, 'too small'", "AssertionError: too small"),
        ("def f(:", "SyntaxError"), ("nothing()", "NameError: name 'nothing'"), ("class E(Exception): pass\nraise E", "E"),
        ("def f(): f()\nf()", "RecursionError"), ("import nothing", "ImportError: nothing"),
        ("raise SystemExit(0)", "SystemExit"), ("import sys\nsys.exit()", "SystemExit"), ("import os\nos._exit(0)", "ended early"),
        ("import os\nos.abort()", "ended early"), ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_the_reason_why_it_does_not(code: str, reason: str) -> None:
    assert run_program(code).startswith(reason)


def test_what_benchmarks_use_is_there() -> None:
    code = """
import array, cmath, datetime, hashlib, os, random, statistics, sys, unittest
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
@dataclass
class Point:
    x: int
class Colour(Enum):
    RED = 1
class Pair(NamedTuple):
    a: int
assert array.array("i", [1, 2])[1] == 2 and cmath.sqrt(-1) == 1j
assert datetime.datetime.strptime("2024-02-29", "%Y-%m-%d").day == 29
assert hashlib.md5(b"a").hexdigest().startswith("0cc1") and statistics.median([1, 2, 3]) == 2
random.seed(1); random.shuffle([1, 2]); assert sys.maxsize > 1 and os.path.join("a", "b") == "a/b"
assert Point(1) == Point(1) and Colour.RED.value == 1 and Pair(1).a == 1 and namedtuple("N", "a")(2).a == 2
if __name__ == "__main__":
    raise SystemExit
"""
    assert run_program(code) == "passed"


# What is tried, and what the sandbox says; MARK stands for a path outside, SECRET for a file there.
ATTACKS = {
    "loop": ("while True: pass", "out of time"),
    "sleep": ("import time\ntime.sleep(60)", "out of time"),
    "memory": ("x = [0] * (1 << 30)", "MemoryError"),
    "memory, slowly": ("x = []\nwhile True: x.append('x' * 1_000_000 + str(len(x)))", "MemoryError"),
    "fork": ("import os\nos.fork()", "ValueError: not allowed: os.fork"),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except Exception: pass", "out of time"),
    "thread": ("import threading", "ImportError"),
    "subprocess": ("import subprocess", "ImportError"),
    "shell": ("import os\nos.system('touch MARK')", "ValueError: not allowed: os.system"),
    "write": ("open('MARK', 'w').write('x')", "ValueError: not allowed: open"),
    "fill the disk": ("f = open('MARK', 'wb')\nwhile True: f.write(b'x' * 1_000_000)", "ValueError: not allowed: open"),
    "fill the own folder": ("import os\nos.open('x', os.O_CREAT | os.O_WRONLY)", "ValueError: not allowed: open"),
    "folders without end": ("import os\nwhile True: os.mkdir('x'); os.chdir('x')", "ValueError: not allowed: os.mkdir"),
    "pipes without end": ("import os\nos.mkfifo('MARK')", "AttributeError"),
    "memory files": ("import os\nos.memfd_create('x')", "OSError"),
    "read": ("open('SECRET').read()", "ValueError: not allowed: open"),
    "read by descriptor": ("import os\nos.open('SECRET', 0)", "ValueError: not allowed: open"),
    "list": ("import os\nos.listdir('/')", "ValueError: not allowed: os.listdir"),
    "remove": ("import os\nos.remove('SECRET')", "ValueError: not allowed: os.remove"),
    "socket": ("import socket", "ImportError"),
    "web": ("import urllib.request", "ImportError"),
    "ctypes": ("import ctypes", "ImportError"),
    "lift the limits": ("import sys\nr = sys.modules['resource']\nr.setrlimit(r.RLIMIT_NOFILE, (9, 9))", "ValueError: not allowed"),
    "the word from standard input": ("import os\nos.lseek(0, 0, 0)\nassert b'word' in os.read(0, 9999)", "AssertionError"),
    "the word from a descriptor": (
        "import os\nfor fd in range(64):\n    try: found = os.pread(fd, 99_999, 0)\n    except OSError: continue\n"
        "    assert b'word' not in found\nos._exit(0)", "ended early",
    ),
    "an object that equals all": ("import sys\nsys.modules['builtins'].AssertionError = None\nassert 1 == 2", "AssertionError"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_contained(name: str, tmp_path: Path) -> None:
    secret, mark = tmp_path / "secret", tmp_path / "mark"
    secret.write_text("secret")
    code, reason = ATTACKS[name]
    seconds = 1 if reason == "out of time" else 60  # a busy machine takes a while to start a process
    began = time.monotonic()
    outcome = run_program(code.replace("MARK", str(mark)).replace("SECRET", str(secret)), seconds=seconds)
    assert outcome.startswith(reason), outcome
    assert time.monotonic() - began < seconds + 30
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


FORGERIES = {
    "builtins behind the import": "__builtins__['__import__'].__globals__['__builtins__']['repr'] = lambda x: '9'\n",
    "word from standard input": (
        "import typing\np = typing.sys.modules['posix']\np.lseek(0, 0, 0)\n"
        "word = str(p.read(0, 9999)).split('\"word\": \"')[1][:32]\n"
        "for fd in range(1, 64):\n    try: p.write(fd, (word + '[9]').encode())\n    except OSError: pass\np._exit(0)\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_results_cannot_be_forged(name: str) -> None:
    assert run_function(FORGERIES[name] + "def f(): return 5", "f", [[]]) in (None, [5])


# The same again for code that finds a way around the hook: here it is told that everything is harmless.
BELOW = {
    "read": ("open('SECRET').read()", "OSError"),
    "write": ("open('MARK', 'w')", "OSError"),
    "socket": ("import _socket\n_socket.socket()", "OSError"),
    "folder": ("import os\nos.mkdir('MARK')", "PermissionError"),
    "fork": ("import os\nos.fork()", "BlockingIOError"),
}


@pytest.mark.parametrize("name", BELOW)
def test_the_system_holds_where_the_hook_does_not(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refusion.evaluation import sandbox

    open_hook = sandbox._CHILD.replace("if event not in harmless:", "if False:")
    assert open_hook != sandbox._CHILD
    monkeypatch.setattr(sandbox, "_CHILD", open_hook)
    monkeypatch.setattr(sandbox, "LIBRARY", [*sandbox.LIBRARY, "_socket"])
    tmp_path.chmod(0o755)
    (tmp_path / "secret").write_text("secret")
    code, reason = BELOW[name]
    code = code.replace("MARK", str(tmp_path / "mark")).replace("SECRET", str(tmp_path / "secret"))
    outcome = run_program(code)
    import os

    if name == "folder" and os.geteuid() != 0:
        pytest.skip("this user's own folders are open to it")
    assert outcome.startswith(reason), outcome


def test_programs_can_run_side_by_side() -> None:
    outcomes: list[str] = []
    threads = [threading.Thread(target=lambda: outcomes.append(run_program("assert sum(range(9)) == 36"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == ["passed"] * 4
