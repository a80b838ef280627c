"""The task that the demo's model learns, `abcd|` -> `dcba`, and how answers are decoded and scored.

Training and the scoring of the export use these functions alike, so a difference between two scores can only come
from the weights.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHORTEST, LONGEST = 4, 8
HELD_OUT_PER_LENGTH = 60
SEED = 20

# 256 bytes and three special tokens: an odd vocabulary, so that two ranks hold shards of unequal size.
VOCAB = 259
EOS = "<eos>"


def write_tokenizer(out: Path) -> None:
    """A byte-level tokenizer in the usual files; nothing is trained or downloaded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", EOS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core: Any = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(special + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast: Any = PreTrainedTokenizerFast  # untyped in transformers
    tokenizer = fast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token=EOS, model_max_length=64)
    tokenizer.save_pretrained(str(out))


def held_out() -> list[str]:
    """Strings that are only ever used for scoring: as many of each length, none of them ever drawn in training."""
    import random

    source = random.Random(SEED)
    return [
        "".join(source.choices(LETTERS, k=length))
        for length in range(SHORTEST, LONGEST + 1)
        for _ in range(HELD_OUT_PER_LENGTH)
    ]


def batch(source: Any, tokenizer: Any, size: int, barred: frozenset[str]) -> tuple[Any, Any]:
    """One training batch from a `random.Random`: token ids [size, 2n + 2] and labels, with the prompt masked out."""
    import torch

    length = source.randint(SHORTEST, LONGEST)
    lines: list[str] = []
    while len(lines) < size:
        text = "".join(source.choices(LETTERS, k=length))
        if text not in barred:
            lines.append(f"{text}|{text[::-1]}{EOS}")
    ids = torch.tensor(tokenizer(lines)["input_ids"])
    labels = ids.clone()
    labels[:, : length + 1] = -100
    return ids, labels


def answers(model: Any, tokenizer: Any, strings: Sequence[str]) -> list[str]:
    """What the model answers to each string, decoded greedily; everything after `|`, the end token included.

    Strings of one length go through together. The number of forward passes depends on the lengths alone, so that
    ranks of a sharded model that answer different strings stay in step.
    """
    import torch

    replies = [""] * len(strings)
    with torch.no_grad():
        for length in sorted({len(text) for text in strings}):
            rows = [row for row, text in enumerate(strings) if len(text) == length]
            ids = torch.tensor(tokenizer([f"{strings[row]}|" for row in rows])["input_ids"])
            for _ in range(length + 1):
                following = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
                ids = torch.cat([ids, following[:, None]], 1)
            for row, reply in zip(rows, tokenizer.batch_decode(ids[:, length + 1 :]), strict=True):
                replies[row] = reply
    return replies


def accuracy(strings: Sequence[str], replies: Sequence[str]) -> float:
    """The part of the strings that came back exactly reversed, end token included."""
    right = sum(reply == text[::-1] + EOS for text, reply in zip(strings, replies, strict=True))
    return right / len(strings)


def read_score(path: Path) -> dict[str, Any]:
    score: dict[str, Any] = json.loads(path.read_text())
    return score


def write_score(path: Path, **score: Any) -> None:
    path.write_text(json.dumps(score, indent=1) + "\n")
