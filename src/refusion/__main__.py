"""The process `refusion`, and `python -m refusion`: the command line, interrupted at any moment without a traceback.

Contract: nothing is imported here before `run` can answer Ctrl-C; what the command line does is `refusion.cli`'s.
"""

import sys


def run() -> int:
    """The exit code of this process's command line; 130 for a Ctrl-C while its modules are imported."""
    try:
        from refusion.cli import main

        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
