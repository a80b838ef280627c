"""The command line. `main` is the console script; one module a command, and `run` turns outcomes into exit statuses."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Runs the command in sys.argv and exits with its status."""
    import sys

    try:
        from reshard.cli.app import run_app

        status = run_app(sys.argv[1:])
    except KeyboardInterrupt:  # while modules were still being imported
        print("reshard: interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)
