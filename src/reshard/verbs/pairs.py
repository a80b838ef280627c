"""Two checkpoints side by side: the tensors of one with those of the other, in whatever layouts they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import ReshardError
from reshard.families import find_family
from reshard.transforms.experts import convert_experts
from reshard.transforms.names import strip_wrappers
from reshard.transforms.ties import EMBEDDINGS, HEADS, declares_tie

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.checkpoint import Checkpoint
    from reshard.tensors.lazy import LazyTensor


class Pair(NamedTuple):
    """A tensor of A and its counterpart in B, under the name that both have."""

    name: str
    a: LazyTensor
    b: LazyTensor


@dataclass(frozen=True)
class Aligned:
    """pairs in A's order, the names that only one side has, and notes on how they were brought together."""

    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]


def align(a: Checkpoint, b: Checkpoint) -> Aligned:
    """Pairs the tensors of two checkpoints by name.

    Wrapper levels in names are removed. Where names still differ, both sides are seen in the layout of the family's Hub
    releases (experts included), if that brings them closer. A side without a config borrows the other's. The head of a
    tied model may be missing on one side: it is then compared with the embedding.
    """
    left: Mapping[str, LazyTensor] = strip_wrappers(a.tensors)
    right: Mapping[str, LazyTensor] = strip_wrappers(b.tensors)
    notes: list[str] = []
    if left.keys() != right.keys():
        hub_left, hub_right = _hub_view(left, a, b), _hub_view(right, b, a)
        if len(hub_left.keys() ^ hub_right.keys()) < len(left.keys() ^ right.keys()):
            left, right = hub_left, hub_right
            notes.append("compared under the names of the family's Hub releases")
    pairs = [Pair(name, tensor, right[name]) for name, tensor in left.items() if name in right]
    only_a = [name for name in left if name not in right]
    only_b = [name for name in right if name not in left]
    if declares_tie(a.config) or declares_tie(b.config):
        for mine, own, other in ((only_a, left, right), (only_b, right, left)):
            head = next((name for name in mine if name in HEADS), None)
            embedding = next((name for name in EMBEDDINGS if name in other), None)
            if head is not None and embedding is not None:
                pairs.append(
                    Pair(head, *((own[head], other[embedding]) if own is left else (other[embedding], own[head])))
                )
                mine.remove(head)
                notes.append(f"{head} lies on one side only and is compared with {embedding}, as the config ties them")
    return Aligned(tuple(pairs), tuple(only_a), tuple(only_b), tuple(notes))


def _hub_view(tensors: Mapping[str, LazyTensor], own: Checkpoint, other: Checkpoint) -> Mapping[str, LazyTensor]:
    """The tensors as the Hub names them; as they are where that is not possible."""
    config = own.config or other.config
    try:
        return convert_experts(tensors, find_family(config), config, "hub")[0]
    except ReshardError:
        return tensors
