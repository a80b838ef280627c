"""What a person may say about how to open a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpenOptions:
    """config_from: directory to take config.json and tokenizer from. model_key: which group of keys is the model."""

    config_from: str | None = None
    model_key: str | None = None
