"""The demonstration: a tiny model is really trained on two ranks, saved sharded, converted, checked and scored."""

from __future__ import annotations

from reshard.demo.run import run_demo

__all__ = ["run_demo"]
