"""Runs Python code that a model wrote: a process of its own, limits on time and memory, no network, an empty folder.

Contract: `run_function` returns what the function returned, or None when it failed in any way. It never raises because of
the code, and never takes much longer than it is told. It is meant for the short functions of benchmarks; it is not a boundary
against a determined attacker.
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

# The child limits itself and then runs the code. An audit hook refuses whatever is not named: files, processes, sockets,
# imports from disk, looking at frames. What the code prints goes nowhere: results leave by a pipe of their own, opened by a word
# that the code does not know, and are written out by functions that it cannot replace (builtins of its own, exact types only).
_CHILD = r"""
__builtins__ = dict(vars(__builtins__))  # private to this script: whatever the code changes, it changes elsewhere

def main():
    import builtins, json, posix, resource, sys
    import __future__, bisect, collections, copy, functools, heapq, itertools, math, operator, re, string, typing
    from _json import encode_basestring_ascii as quote

    job = json.load(sys.stdin)
    fd = int(sys.argv[1])
    offered = "__future__ bisect collections copy functools heapq itertools math operator re string typing".split()
    odd_floats = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    harmless = {"compile", "exec", "builtins.id"}
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

    def offer(name, *rest):
        if name.split(".")[0] not in offered:
            raise ImportError(name)
        return load(name, *rest)

    def refuse(event, arguments):
        if event not in harmless:
            raise ValueError("not allowed: " + event)

    def limit(name, value):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))

    limit("CPU", job["seconds"])
    limit("AS", job["bytes"])
    for name in ("FSIZE", "CORE", "NPROC"):
        limit(name, 0)
    own = {**vars(builtins), "__import__": offer}
    scope = {"__name__": "answer", "__builtins__": own}
    code = compile(job["code"], "<answer>", "exec")
    del sys.modules["__main__"]
    sys.addaudithook(refuse)
    exec(code, scope)
    results = []
    for arguments in job["calls"]:
        results.append(text(scope[job["name"]](*arguments)))
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
    word = secrets.token_hex(16)
    job = {"code": code, "name": name, "calls": calls, "seconds": int(seconds) + 1, "bytes": megabytes << 20, "word": word}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file:
        file.write(json.dumps(job).encode())
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
