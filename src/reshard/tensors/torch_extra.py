"""torch is an extra: the one place that imports it for the core and says how to get it."""

from __future__ import annotations

from typing import Any

from reshard.errors import UsageError


def require_torch(purpose: str) -> Any:
    """The torch module, or a UsageError that says what needs it and how to install it."""
    try:
        import torch
    except ImportError as error:
        raise UsageError("torch", "torch", f"{purpose} needs torch", "pip install 'reshard[torch]'") from error
    return torch
