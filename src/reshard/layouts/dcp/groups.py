"""Which keys of a DCP checkpoint are the model.

torch flattens nested dicts into keys joined by dots, and records the nested path of each key in planner_data. The
last element of a path is the parameter's own name (which may hold dots); the elements before it are the dict that it
came from, its group. Tensors are sorted by group; groups of optimizers, schedulers and progress are left out; one
group whose names look like a model's must remain.

Without recorded paths the wrapper is found from the names: the longest common prefix of known wrapper words after which
the names still hold an embedding or numbered layers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard.checkpoint import Dropped
from reshard.errors import Damaged, Refused
from reshard.layouts.dcp.light import MEGATRON, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Path = tuple[str | int, ...]

# Parts of a nested path that say what a group is, and the reason under which it is left out.
TRAINING_STATE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(.*_)?(optim|optims|optimizer|optimizers)(_\w+)?|opt_state|optimizer_states?"), "optimizer state"),
    (re.compile(r"(lr_)?sched(uler)?s?(_states?)?"), "scheduler state"),
    (re.compile(r"(.*_)?(data_?loaders?|sampler)(_states?)?"), "dataloader state"),
    (re.compile(r"progress|(train|trainer|training)_state|rng(_states?)?|grad_?scaler|scaler"), "training progress"),
)
# Names inside a group that hold moments and steps of an optimizer, whatever the group is called.
OPTIMIZER_NAME = re.compile(
    r"(state|param_groups)\..*|(.*\.)?(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|square_avg|master_param|step)"
)
MODEL_NAME = re.compile(
    r"(^|.*[._])(layers?|h|blocks?)\.\d+\..*"
    r"|(^|.*\.)(embed_tokens|tok_embeddings|word_embeddings|embed_in|wte|embeddings?|lm_head)\.\w+"
)
MEGATRON_NAME = re.compile(
    r"(.*\.)?(decoder|encoder)\.layers\..*linear_(qkv|proj|fc1|fc2)\..*|(.*\.)?embedding\.word_embeddings\.weight"
)
WRAPPERS = frozenset(("app", "model", "models", "module", "state", "state_dict", "model_state", "model_state_dict"))
LISTED = 50


class Chosen(NamedTuple):
    """names: key -> name in the model; group: what holds the model, dotted; left_out: the rest; warnings."""

    names: dict[str, str]
    group: str
    left_out: tuple[Dropped, ...]


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def choose(
    where: str,
    tensors: Iterable[str],
    others: Sequence[str],
    paths: Mapping[str, Path] | None,
    model_key: str | None,
) -> Chosen:
    """The model among the keys. others: keys of items that are not tensors.

    Raises Refused (no model, or several: --model-key decides) or Damaged (a path that does not spell its key).
    """
    tensors = list(tensors)
    if paths is None:
        paths = _guess_paths(where, tensors, others, model_key)
    else:
        for key in (*tensors, *others):
            path = paths.get(key)
            if path is None:
                raise Damaged("pickle", where, f"records no path for {printable(key)!r}")
            if _dotted(path) != key:
                raise Damaged("pickle", where, f"records a path for {printable(key)!r} that does not spell it")
    groups: dict[Path, list[str]] = {}
    for key in tensors:
        groups.setdefault(paths[key][:-1], []).append(key)
    named = model_key is not None
    prefix = _find_group(where, model_key, groups) if model_key is not None else _find_model(where, groups, paths)
    names: dict[str, str] = {}
    owner: dict[str, str] = {}
    depth = len(prefix)
    for key in tensors:
        path = paths[key]
        if path[:depth] != prefix or (not named and len(path) != depth + 1):
            continue
        name = str(path[-1]) if len(path) == depth + 1 else _dotted(path[depth:])
        if name in owner:
            raise Refused(
                "collision", where, f"{printable(owner[name])!r} and {printable(key)!r} are both {printable(name)!r}"
            )
        owner[name] = key
        names[key] = name
    return Chosen(names, _dotted(prefix), _left_out(tensors, others, paths, names, prefix))


def _state_of(path: Path) -> tuple[int, str]:
    """(length of the path that names a part of the training state, reason); (0, "") where none does."""
    for i, part in enumerate(path):
        for pattern, reason in TRAINING_STATE:
            if isinstance(part, str) and pattern.fullmatch(part):
                return i + 1, reason
    return 0, ""


def _find_group(where: str, model_key: str, groups: Mapping[Path, list[str]]) -> Path:
    wanted = model_key.strip(".")
    for group in groups:
        for depth in range(len(group) + 1):
            if _dotted(group[:depth]) == wanted:
                reason = _state_of(group[:depth])[1]
                if reason:
                    raise Refused(
                        "model-key", where, f"{printable(wanted)!r} is {reason}, no model", "name another group"
                    )
                return group[:depth]
    known = ", ".join(sorted({printable(_dotted(g)) or '""' for g in groups if not _state_of(g)[0]})[:8])
    raise Refused("model-key", where, f"holds no group {printable(model_key)!r}", f"--model-key takes one of: {known}")


def _find_model(where: str, groups: Mapping[Path, list[str]], paths: Mapping[str, Path]) -> Path:
    rest = {group: keys for group, keys in groups.items() if not _state_of(group)[0]}
    for group, keys in list(rest.items()):
        if all(OPTIMIZER_NAME.fullmatch(str(paths[key][-1])) for key in keys):
            del rest[group]
    models = [g for g, keys in rest.items() if any(MODEL_NAME.fullmatch(str(paths[key][-1])) for key in keys)]
    if len(models) == 1:
        return models[0]
    if not models and len(rest) == 1:
        # Nothing else could be meant.
        return next(iter(rest))
    if not rest:
        raise Refused(
            "model-key", where, "holds no model, only training state", "name the directory that holds the weights"
        )
    listed = ", ".join(sorted(printable(_dotted(group)) or '""' for group in (models or rest))[:8])
    what = "several groups that could be the model" if models else "no group that looks like a model"
    raise Refused("model-key", where, f"holds {what}: {listed}", "choose one with --model-key")


def _left_out(
    tensors: Sequence[str], others: Sequence[str], paths: Mapping[str, Path], names: Mapping[str, str], prefix: Path
) -> tuple[Dropped, ...]:
    """What is not of the model: folded to one line a part, but each non-tensor inside the model by name."""
    parts: dict[tuple[str, str], int] = {}
    single: list[Dropped] = []
    for key in (*tensors, *others):
        if key in names:
            continue
        path = paths[key]
        depth, reason = _state_of(path)
        if depth:
            part = (_dotted(path[:depth]), reason)
        elif path[:-1] == prefix and len(single) < LISTED:
            single.append(Dropped(key, "not a tensor"))
            continue
        elif path[:-1] == prefix:
            part = (_dotted(prefix) or "top level", "not a tensor")
        elif prefix and path[: len(prefix)] == prefix:
            part = (_dotted(path[: len(prefix) + 1]), "a nested value, not a parameter")
        elif OPTIMIZER_NAME.fullmatch(str(path[-1])):
            part = (_dotted(path[:2]), "optimizer state")
        else:
            part = (_dotted(path[:-1]) or "top level", "outside the model")
        parts[part] = parts.get(part, 0) + 1
    folded = (
        Dropped(name, f"{reason} ({count} item{'s' * (count > 1)})") for (name, reason), count in sorted(parts.items())
    )
    return (*folded, *single)


def _guess_paths(where: str, tensors: Sequence[str], others: Sequence[str], model_key: str | None) -> dict[str, Path]:
    """Paths of two or three elements, from the names alone."""
    if any(MEGATRON_NAME.fullmatch(key) for key in tensors):
        raise Refused("layout", where, *MEGATRON)
    paths: dict[str, Path] = {}
    model = []
    for key in (*tensors, *others):
        parts = key.split(".")
        depth, _ = _state_of(tuple(parts))
        if depth:
            paths[key] = (*parts[:depth], ".".join(parts[depth:])) if parts[depth:] else (*parts[:depth],)
        else:
            model.append(key)
    if model_key is not None:
        wrapper = [part for part in model_key.split(".") if part]
    else:
        wrapper = _common_wrapper([key for key in model if not OPTIMIZER_NAME.fullmatch(key)])
    if model_key is None and not wrapper:
        _refuse_mixed(where, model)
    for key in model:
        parts = key.split(".")
        inside = parts[: len(wrapper)] == wrapper and len(parts) > len(wrapper)
        paths[key] = (*wrapper, ".".join(parts[len(wrapper) :])) if inside else ("", key)
    return paths


def _refuse_mixed(where: str, keys: Sequence[str]) -> None:
    """Without recorded paths, and without one wrapper around all keys, some may be of something else than the model."""
    below: dict[str, set[str]] = {}
    for key in keys:
        first, _, rest = key.partition(".")
        below.setdefault(first, set()).add(rest)
    names = sorted(below)
    copies = any(below[a] & below[b] - {"weight", "bias", ""} for i, a in enumerate(names) for b in names[i + 1 :])
    wrapped = any(
        word in WRAPPERS and any(rest.startswith(("model.layers.", "model.embed_tokens.")) for rest in below[word])
        for word in names
    )
    if len(names) > 1 and (copies or wrapped):
        raise Refused(
            "ambiguous", where,
            f"records no paths, and its keys are of several groups ({printable(', '.join(names[:8]))})",
            "--model-key names the one that is the model",
        )  # fmt: skip


def _common_wrapper(keys: Sequence[str]) -> list[str]:
    """The longest common prefix of wrapper words that leaves names with an embedding or numbered layers."""
    wrapper: list[str] = []
    if not keys:
        return wrapper
    split = [key.split(".") for key in keys]
    for depth in range(min(map(len, split)) - 1):
        word = split[0][depth]
        if word not in WRAPPERS or any(parts[depth] != word for parts in split):
            break
        rest = [".".join(parts[depth + 1 :]) for parts in split]
        if not any(MODEL_NAME.fullmatch(name) for name in rest):
            break
        # A tied Hugging Face model has `model.` before every name; it is part of the names.
        if word == "model" and any(name.startswith("embed_tokens.") for name in rest):
            break
        wrapper.append(word)
    return wrapper
