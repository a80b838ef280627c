"""The command line. `main` is the console script; one module a command, and `run` turns outcomes into exit statuses."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Runs the command in sys.argv and exits with its status."""
    import sys

    from reshard.cli.app import run_app

    sys.exit(run_app(sys.argv[1:]))
