"""Fixtures that several test files share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
MINIS = ("llama", "llama_tied", "qwen3", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="session")
def mini_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Hugging Face checkpoint of each family. Not to be changed: copy what a test changes."""
    import mini_models

    root = tmp_path_factory.mktemp("minis")
    for family in MINIS:
        mini_models.write(family, root / family)
    return root
