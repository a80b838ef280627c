"""What a family's table says, as frozen data. `reshard.families.load` fills these from TOML."""

from __future__ import annotations

from dataclasses import dataclass

MATRICES = ("gate", "up", "down")
BIASES = ("gate_bias", "up_bias", "down_bias")
ROLES = (*MATRICES, *BIASES)
MEMORY = "memory"


@dataclass(frozen=True)
class ExpertTensor:
    """One stored tensor of an expert layout.

    name:        below the decoder layer. A segment `{e}` stands for the expert number; without it all experts lie in
                 one tensor
    holds:       roles (gate, up, down and their biases) in the order in which they lie along the output axis
    join:        "concat" (one after the other) or "interleave" (rows taking turns), where it holds several
    orientation: "out-in" for [out, in] as in a Linear's weight, "in-out" for its transpose; of no effect on biases
    experts:     "stack" for [E, ...] or "rows" for [E * rows, columns], where all experts lie in one tensor
    """

    name: str
    holds: tuple[str, ...]
    join: str = "concat"
    orientation: str = "out-in"
    experts: str = "stack"

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.name

    @property
    def is_bias(self) -> bool:
        return self.holds[0] in BIASES


@dataclass(frozen=True)
class ExpertLayout:
    """A complete way to store the routed experts of one layer."""

    name: str
    tensors: tuple[ExpertTensor, ...]

    def row(self, name: str) -> ExpertTensor:
        return next(row for row in self.tensors if row.name == name)


@dataclass(frozen=True)
class Experts:
    """The routed experts of a family.

    count, intermediate, hidden: config keys of the number of experts, the width of one expert (I) and the model's width
                 (H). Dots go into nested tables; the first key present counts, the text config's before the outer one's
    hub, memory: names of the layouts of Hub releases and of transformers' modules
    """

    count: tuple[str, ...]
    intermediate: tuple[str, ...]
    hub: str
    memory: str
    layouts: tuple[ExpertLayout, ...]
    hidden: tuple[str, ...] = ("hidden_size",)

    def layout(self, name: str) -> ExpertLayout | None:
        return next((layout for layout in self.layouts if layout.name == name), None)


@dataclass(frozen=True)
class Rename:
    """Another writer's name for what the Hub calls `hub`. Applies both ways. Routed experts have layouts instead.

    source:  who writes that name: "memory" (transformers' modules) or a trainer
    where:   "tail" (the whole end of the name, below the decoder layer), "module" (a run of segments anywhere) or
             "prefix" (the beginning; of several that fit, the longest counts)
    squeeze: the other writer may add a leading axis of length 1
    """

    source: str
    name: str
    hub: str
    where: str = "tail"
    squeeze: bool = False


@dataclass(frozen=True)
class Join:
    """Tensors other than routed experts that another writer keeps as one.

    source: who does, as in Rename
    name:   end of the one's name
    parts:  ends of the Hub's names, in the order in which they lie along `axis`, in equal parts
    """

    source: str
    name: str
    parts: tuple[str, ...]
    axis: int = 0


@dataclass(frozen=True)
class Unplaced:
    """A tensor that some trainer keeps and Hub checkpoints have no place for: refused until the user drops it.

    name: end of the tensor's name, below the decoder layer. why: what it is, in a clause.
    """

    name: str
    why: str


@dataclass(frozen=True)
class Mtp:
    """Multi-token-prediction layers.

    count:  config key of their number
    prefix: where they lie; without it they are the decoder layers from `num_hidden_layers` on
    """

    count: str
    prefix: str | None = None


@dataclass(frozen=True)
class SparseLayers:
    """Config keys that say which decoder layers have routed experts.

    first: number of dense layers at the beginning; where a config lacks it, nothing can be told
    step:  every step-th layer is sparse, counted from 1
    dense: list of layers that are dense all the same
    kinds: list of "dense" or "sparse", one a layer; where a config has it, it alone decides
    """

    first: str | None = None
    step: str | None = None
    dense: str | None = None
    kinds: str | None = None


@dataclass(frozen=True)
class Family:
    """One model family.

    layers, embedding, head: prefix of the decoder layers, and names of the two vocabulary matrices, on the Hub
    towers:           prefixes of what is not the text model (vision, projectors)
    tied_by_default:  what an absent `tie_word_embeddings` means
    router, correction_bias, shared_experts, sinks: modules or tensors below the decoder layer; "" where there are none
    norms:            regular expressions of norm weights whose name does not say so
    fp32_pins:        regular expressions of tensors that keep the dtype they are stored in
    keep_unquantized: regular expressions of modules that the family's FP8 releases leave alone
    scale_groups:     modules that servers fuse, so that their quantisation scales must agree
    renames, joins, unplaced, mtp, sparse, experts: see their tables
    """

    name: str
    model_types: tuple[str, ...]
    layers: str = "model.layers."
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    towers: tuple[str, ...] = ()
    tied_by_default: bool = False
    router: str = ""
    correction_bias: str = ""
    shared_experts: str = ""
    sinks: str = ""
    norms: tuple[str, ...] = ()
    fp32_pins: tuple[str, ...] = ()
    keep_unquantized: tuple[str, ...] = ()
    scale_groups: tuple[tuple[str, ...], ...] = ()
    renames: tuple[Rename, ...] = ()
    joins: tuple[Join, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    mtp: Mtp | None = None
    sparse: SparseLayers | None = None
    experts: Experts | None = None
