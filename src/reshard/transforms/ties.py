"""Tied embeddings: one matrix under two names, as the config declares and the bytes confirm."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from reshard.families import find_family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.families import Family
    from reshard.tensors.lazy import LazyTensor

FLAG = "tie_word_embeddings"
NESTED = ("text_config", "llm_config", "language_config")
# Where neither family nor config says more: the usual names of the two matrices, the prefix of a text tower in front.
HEADS = ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight")
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)


def declares_tie(config: Mapping[str, Any] | None) -> bool:
    """Whether the config ties head and embedding. The outer flag counts where it is present, else the text config's,
    else what the family means by leaving it out."""
    for level in (config or {}, *((config or {}).get(key) or {} for key in NESTED)):
        if isinstance(level, dict) and isinstance(level.get(FLAG), bool):
            return bool(level[FLAG])
    family = find_family(config)
    return family is not None and family.tied_by_default


def find_tie(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Any] | None, family: Family | None
) -> tuple[dict[str, LazyTensor], tuple[str, str] | None, list[str]]:
    """(tensors, the pair (head, embedding) whose bytes decide, notes).

    No pair where the config ties nothing or only one of the two is stored. A lone head of a tied model is written under
    the embedding's name, which is where every reader looks for it; of an unknown family it is left as it is, and said.
    """
    found = dict(tensors)
    if not declares_tie(config):
        return found, None, []
    heads = (family.head, *HEADS) if family else HEADS
    embeddings = (family.embedding, *EMBEDDINGS) if family else EMBEDDINGS
    head = next((name for name in heads if name in found), None)
    embedding = next((name for name in embeddings if name in found), None)
    if head is None or embedding is not None:
        return found, (head, embedding) if head is not None and embedding is not None else None, []
    if family is None:
        return found, None, [f"the config ties {head} to an embedding, which is not in the checkpoint"]
    found = {family.embedding if name == head else name: tensor for name, tensor in found.items()}
    return found, None, [f"{head} is the only copy of a tied matrix and is written as {family.embedding}"]


def untie(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the flag false wherever it stands."""
    result = deepcopy(dict(config))
    todo = [result]
    while todo:
        level = todo.pop()
        if FLAG in level:
            level[FLAG] = False
        todo += [value for value in level.values() if isinstance(value, dict)]
    result[FLAG] = False
    return result
