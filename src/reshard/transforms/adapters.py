"""Adapters in a checkpoint: recognised by their tensors' names, never by a directory's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterable

ADAPTER = re.compile(r"(^|\.)(lora_(A|B|embedding_A|embedding_B|magnitude_vector|bias)|base_layer)(\.|$)")


def refuse_lora(names: Iterable[str]) -> None:
    """Refused when any name is a LoRA factor or a wrapped base layer: converting those as weights loses the training."""
    found = [name for name in names if ADAPTER.search(name)]
    if found:
        raise Refused(
            "adapter", found[0], f"this is a LoRA checkpoint ({len(found)} adapter tensors)",
            "merge the adapter into the model in the trainer and save again, or save it as a PEFT adapter",
        )  # fmt: skip
