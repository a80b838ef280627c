"""Adapters in a checkpoint: recognised by their tensors' names, never by a directory's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterable

# PEFT's factors, the layers it wraps and its copies of trained modules, as whole segments of a name.
ADAPTER = re.compile(
    r"(^|\.)(lora_(A|B|embedding_A|embedding_B|magnitude_vector|bias)|base_layer|modules_to_save|original_module)(\.|$)"
)
REMEDY = "merge the adapter into the model in the trainer and save again, or export it as a PEFT adapter"


def refuse_lora(names: Iterable[str]) -> None:
    """Refused when a name is a LoRA factor or part of a wrapped layer: as plain weights they lose the training."""
    found = [name for name in names if ADAPTER.search(name)]
    if found:
        raise Refused("adapter", found[0], f"is part of a LoRA checkpoint ({len(found)} adapter tensors)", REMEDY)
