"""Runs Python code that a model wrote: a process of its own, limits on time and memory, no network, an empty folder.

Contract: `run_function` returns what the function returned, or None when it failed in any way. It never raises because of
the code. It is meant for the short functions of benchmarks; it is not a boundary against a determined attacker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

# The child limits itself first and then runs the code: an audit hook refuses sockets, processes and files.
_CHILD = r"""
import json, resource, sys
job = json.loads(sys.stdin.read())
resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"]))
resource.setrlimit(resource.RLIMIT_AS, (job["bytes"], job["bytes"]))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
barred = ("socket.", "subprocess.", "os.", "shutil.", "ctypes.", "open", "import", "signal.", "tempfile.")
def refuse(event, args):
    if event.startswith(barred):
        raise PermissionError(event)
code = compile(job["code"], "<answer>", "exec")
scope = {"__name__": "answer"}
results, out = [], sys.stdout
sys.stdout = sys.stderr
sys.addaudithook(refuse)
exec(code, scope)
for arguments in job["calls"]:
    results.append(scope[job["name"]](*arguments))
out.write(json.dumps(results))
out.flush()
"""


def run_function(
    code: str, name: str, calls: list[list[Any]], *, seconds: float = 5.0, megabytes: int = 256
) -> list[Any] | None:
    """Results of `name(*arguments)` for each of `calls`, as JSON values; None if anything went wrong.

    seconds: wall clock for the whole; megabytes: address space of the process.
    """
    job = json.dumps({"code": code, "name": name, "calls": calls, "seconds": int(seconds) + 1, "bytes": megabytes << 20})
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _CHILD],
                input=job.encode(), capture_output=True, timeout=seconds, cwd=folder, env={"PATH": os.defpath},
            )  # fmt: skip
            if done.returncode != 0 or len(done.stdout) > 1_000_000:
                return None
            results = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            return None
    return results if isinstance(results, list) else None
