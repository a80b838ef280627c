"""`python -m reshard`, which torchrun needs."""

from __future__ import annotations

from reshard.cli import main

if __name__ == "__main__":
    main()
