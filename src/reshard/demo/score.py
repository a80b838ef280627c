"""Scores a Hugging Face checkpoint on the held-out strings: `python -m reshard.demo.score CHECKPOINT SCORE_JSON`.

The checkpoint is loaded as anyone would load it. Run as its own process, with the environment of a training rank, so
that the same kernels on the same number of threads see the same weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def score(checkpoint: Path, out: Path) -> None:
    """Writes {"accuracy", "answers", "dtype"} of the checkpoint to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from reshard.demo.task import accuracy, answers, held_out, write_score

    disable_bars: Any = logging.disable_progress_bar  # untyped in transformers
    disable_bars()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(str(checkpoint))
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    strings = held_out()
    replies = answers(model, tokenizer, strings)
    write_score(out, accuracy=accuracy(strings, replies), dtype=str(model.dtype), answers=replies)


if __name__ == "__main__":
    score(Path(sys.argv[1]), Path(sys.argv[2]))
