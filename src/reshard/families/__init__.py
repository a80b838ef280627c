"""Model families as data: one TOML file each beside this module, checked once on loading.

A family says how the tensors of its models are named and arranged: on the Hub, in transformers' memory and in trainers.
`reshard.families.tables` explains every field; `reshard.transforms` turns them into rearrangements. A new family is one
new file here.
"""

from __future__ import annotations

from reshard.families.configs import config_int, config_value, sparse_layers, text_levels
from reshard.families.load import all_families, find_family, parse_family
from reshard.families.tables import (
    BIASES,
    MATRICES,
    MEMORY,
    ROLES,
    ExpertLayout,
    Experts,
    ExpertTensor,
    Family,
    Join,
    Mtp,
    Rename,
    SparseLayers,
    Unplaced,
)

__all__ = [
    "BIASES",
    "MATRICES",
    "MEMORY",
    "ROLES",
    "ExpertLayout",
    "ExpertTensor",
    "Experts",
    "Family",
    "Join",
    "Mtp",
    "Rename",
    "SparseLayers",
    "Unplaced",
    "all_families",
    "config_int",
    "config_value",
    "find_family",
    "parse_family",
    "sparse_layers",
    "text_levels",
]
