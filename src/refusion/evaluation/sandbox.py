"""Runs Python code that a model wrote: a process of its own, limits on time and memory, no network, an empty folder.

Contract: `run_function` returns what the function returned, or None when it failed in any way; `run_program` says whether a
program with its tests came to its end. Neither raises because of the code, nor takes much longer than it is told. It is meant
for the short functions of benchmarks; it is not a boundary against a determined attacker.

Two walls stand around the code. Python's: an audit hook refuses what is not named (files, processes, sockets, imports from
disk). The system's: time, memory, no bytes on the disk, no new descriptor (so no file and no socket, however it is asked
for), no new process, and no root: a process that has it becomes `nobody` before it runs the code.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

MAX_RESULT = 1_000_000  # bytes
NOBODY = 65534
PURE = "__future__ bisect collections copy functools heapq itertools math operator re string typing".split()
# What programs of benchmarks import, loaded beforehand where the text names them: no file can be opened later.
LIBRARY = [
    *PURE,
    *"abc array base64 binascii calendar cmath contextlib dataclasses datetime decimal difflib enum fractions hashlib".split(),
    *"io json numbers os pprint queue random secrets statistics struct sys textwrap time timeit traceback types".split(),
    *"unicodedata unittest uuid warnings zlib".split(),
]

# The child limits itself and then runs the code. An audit hook refuses whatever is not named: files, processes, sockets,
# imports from disk, looking at frames. What the code prints goes nowhere: results leave by a pipe of their own, opened by a word
# that the code does not know, and are written out by functions that it cannot replace (builtins of its own, exact types only).
_CHILD = r"""
__builtins__ = dict(vars(__builtins__))  # private to this script: whatever the code changes, it changes elsewhere
OFFER = '''def offer(name, *rest):
    if name.split(".")[0] not in offered:
        raise ImportError(name)
    return load(name, *rest)
'''

def main():
    import builtins, json, os, posix, resource, sys
    from _json import encode_basestring_ascii as quote

    job = json.load(sys.stdin)
    fd = int(sys.argv[1])
    odd_floats = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    harmless = {"compile", "exec", "builtins.id", *job["harmless"]}
    write, leave, load = posix.write, posix._exit, builtins.__import__

    def text(value):  # as JSON
        kind = type(value)
        if value is None or kind is bool:
            return {None: "null", True: "true", False: "false"}[value]
        if kind is int or kind is float:
            return odd_floats.get(repr(value), repr(value))
        if kind is str:
            return quote(value)
        if kind is list or kind is tuple:
            return "[" + ", ".join([text(entry) for entry in value]) + "]"
        if kind is dict and all(type(key) is str for key in value):
            return "{" + ", ".join([quote(key) + ": " + text(entry) for key, entry in value.items()]) + "}"
        raise TypeError("not a JSON value")

    def refuse(event, arguments):
        if event not in harmless:
            raise ValueError("not allowed: " + event)

    def limit(name, value):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))

    def fail(error):  # its class and first argument, without running what the code has put there
        kind, arguments = type(error), BaseException.args.__get__(error)
        name = kind.__name__ if type(kind) is type and type(kind.__name__) is str else "error"
        first = arguments[0] if arguments and type(arguments[0]) is str else ""
        return name + (": " + first[:200] if first else "")

    for name in job["preload"]:
        load(name)
    nothing = posix.open("/dev/null", posix.O_RDWR)
    posix.dup2(nothing, 0)  # the job names the word
    posix.close(nothing)
    for name in ("mkfifo", "mknod", "chroot"):  # the hook is not asked about these
        vars(posix).pop(name, None)
        vars(os).pop(name, None)
    if posix.geteuid() == 0:
        try:
            posix.setgroups([])
            posix.setgid(job["nobody"])
            posix.setuid(job["nobody"])
        except OSError:  # there is no such user here: limits and hook remain
            pass
    limit("CPU", job["seconds"])
    limit("AS", job["bytes"])
    for name in ("FSIZE", "CORE", "NPROC", "NOFILE"):
        limit(name, 0)
    # The code gets hold of this function, and so of its globals: they are its own, and hold nothing of use.
    door = {"load": load, "offered": frozenset(job["modules"]), "__builtins__": {"ImportError": ImportError}}
    exec(OFFER, door)
    own = {**vars(builtins), "__import__": door["offer"]}
    scope = {"__name__": "answer", "__builtins__": own}
    del sys.modules["__main__"]
    sys.addaudithook(refuse)
    results = []
    try:
        exec(compile(job["code"], "<answer>", "exec"), scope)
        for arguments in job["calls"]:
            results.append(text(scope[job["name"]](*arguments)))
    except BaseException as error:
        if not job["reasons"]:
            raise
        results.append(quote(fail(error)))
    data = (job["word"] + "[" + ", ".join(results) + "]").encode()
    while data:
        data = data[write(fd, data):]
    leave(0)

main()
"""


def run_function(
    code: str, name: str, calls: list[list[Any]], *, seconds: float = 5.0, megabytes: int = 256
) -> list[Any] | None:
    """Results of `name(*arguments)` for each of `calls`, as JSON values (a tuple comes as a list); None if anything went wrong.

    seconds: wall clock for the whole; megabytes: address space of the process.
    """
    job = {"code": code, "name": name, "calls": calls, "modules": PURE, "preload": PURE}
    return _results(job, seconds, megabytes)


def run_program(code: str, *, seconds: float = 10.0, megabytes: int = 512) -> str:
    """Run a program, its tests included: "passed" when it came to its end, else why not, in a few words.

    To leave early (`sys.exit`, `os._exit`) is not to pass. The program may import what `LIBRARY` names; `__name__` is not
    `__main__`. seconds: wall clock for the whole; megabytes: address space of the process.
    """
    # data classes and named tuples set attributes of functions
    harmless = ["array.__new__", "object.__setattr__", "time.sleep"]
    job = {"code": code, "calls": [], "modules": [*LIBRARY, "_strptime"], "preload": _named(code)}
    began = time.monotonic()
    reasons = _results({**job, "harmless": harmless, "reasons": True}, seconds, megabytes)
    if reasons is None:
        return "out of time" if time.monotonic() - began >= seconds else "ended early"
    return str(reasons[0]) if reasons else "passed"


def _named(code: str) -> list[str]:
    """What has to be loaded before a program runs: the modules that its text names, and what others load when first used."""
    return [*PURE, *(name for name in LIBRARY if name in code), *(["_strptime"] if "strptime" in code else [])]


def _results(job: dict[str, Any], seconds: float, megabytes: int) -> list[Any] | None:
    """What the child writes for a job, if it begins with the word that only it knows."""
    word = secrets.token_hex(16)
    limits = {"seconds": int(seconds) + 1, "bytes": megabytes << 20, "nobody": NOBODY, "word": word}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file:
        file.write(json.dumps({"reasons": False, "harmless": [], **job, **limits}).encode())
        file.seek(0)
        written = _run([sys.executable, "-I", "-S", "-c", _CHILD], file.fileno(), folder, seconds)
    if not written.startswith(word.encode()) or len(written) > MAX_RESULT:
        return None
    try:
        results: list[Any] = json.loads(written[len(word) :])
    except (ValueError, RecursionError):
        return None
    return results


def _run(command: list[str], stdin: int, folder: str, seconds: float) -> bytes:
    """What the command writes to the pipe whose number is its last argument, until it ends or its time is up."""
    deadline = time.monotonic() + seconds
    source, sink = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, str(sink)], stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(sink,),
            cwd=folder, env={"PATH": os.defpath}, start_new_session=True,
        )  # fmt: skip
        os.close(sink)
        try:
            return _read(source, deadline)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
            process.wait()
    finally:
        os.close(source)


def _read(source: int, deadline: float) -> bytes:
    """All bytes up to the end of a pipe; nothing if the end does not come in time, or after too many of them."""
    data, poll = b"", select.poll()
    poll.register(source, select.POLLIN)
    while len(data) <= MAX_RESULT:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            return b""
        piece = os.read(source, 1 << 16)
        if not piece:
            return data
        data += piece
    return b""
