"""What headers and small files tell of a checkpoint's soundness, for inspect and verify: no tensor byte is read."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checkpoint import Checkpoint
from reshard.errors import Damaged, ReshardError
from reshard.families import find_family
from reshard.layouts import LAYOUTS
from reshard.layouts.hf import INDEX, NOT_MODEL
from reshard.layouts.json_files import read_json
from reshard.tensors.header import read_header, stored_tensors
from reshard.transforms.experts import convert_experts
from reshard.transforms.names import plain_name, strip_wrappers
from reshard.transforms.ties import EMBEDDINGS, HEADS, declares_tie
from reshard.verbs.streaming import problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reshard.families import Family
    from reshard.tensors.lazy import LazyTensor

Problem = dict[str, Any]


def of_error(error: ReshardError) -> Problem:
    """An error as a problem. Its place is a file where it is a path, else a tensor."""
    detail = f"{error.detail}; {error.remedy}" if error.remedy else error.detail
    if error.where and (Path(error.where).exists() or "/" in error.where):
        return problem(error.kind, detail, file=error.where)
    return problem(error.kind, detail, tensor=error.where or None)


def salvage(source: str, error: Damaged) -> tuple[Checkpoint | None, list[Problem]]:
    """(what can still be told of a checkpoint that would not open, all problems found).

    Of a Hugging Face directory every readable file counts, and every unreadable one is a problem. Of other layouts only
    the name is known. None when not even the layout is.
    """
    from reshard.trainers import resolve_run

    problems = [of_error(error)]
    path = Path(source if Path(source).exists() else source.split(",")[0])
    trainer = None
    try:
        run = resolve_run(path)
        if run is not None:
            path, trainer = Path(run.checkpoint_dir), run.trainer
    except ReshardError:
        return None, problems
    layout = next((name for name, module in LAYOUTS.items() if import_module(module).detect(path)), None)
    if layout is None:
        return None, problems
    tensors: dict[str, LazyTensor] = {}
    if layout == "hf":
        seen = {row["file"] for row in problems}
        for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
            if NOT_MODEL.match(file.name) or file.is_symlink() or not file.is_file():
                continue
            try:
                tensors.update(stored_tensors(str(file), read_header(str(file))))
            except ReshardError as other:
                if str(file) not in seen:
                    problems.append(of_error(other))
    config, config_dir = None, None
    if (path / "config.json").is_file():
        try:
            value = read_json(path / "config.json")
            config, config_dir = (value, str(path)) if isinstance(value, dict) else (None, None)
        except ReshardError:
            pass
    checkpoint = Checkpoint(
        tensors, layout, str(path), config, config_dir, training=layout == "dcp", trainer=trainer
    )  # fmt: skip
    return checkpoint, problems


def check_index(checkpoint: Checkpoint) -> list[Problem]:
    """Of a Hugging Face directory: `total_size` is the sum of the tensors, and nothing stale lies beside the files.

    That the index and the headers name the same tensors is checked on opening. A stale file is a problem here, although
    reading ignores it, since some readers take every .safetensors file of a directory.
    """
    home = Path(checkpoint.path)
    if checkpoint.layout != "hf" or not home.is_dir():
        return []
    found = []
    used = {Path(path).name for path in checkpoint.files}
    index = home / INDEX
    if index.is_file():
        body = read_json(index)
        named = {name for name in body["weight_map"].values() if isinstance(name, str)}
        if named & used:
            size = (body.get("metadata") or {}).get("total_size")
            total = checkpoint.nbytes
            if size is not None and size != total:
                found.append(
                    problem("index", f"says total_size {size}, but the tensors have {total} bytes", file=index)
                )
        else:
            found.append(problem("stale", "names none of the files that are here; remove it", file=index))
    for file in sorted(home.glob("*.safetensors")):
        if file.name not in used and not NOT_MODEL.match(file.name):
            found.append(problem("stale", "is not named by the index; remove it", file=file))
    return found


def check_config(checkpoint: Checkpoint) -> list[Problem]:
    """A Hugging Face directory needs a config.json with a model type. (That it is sound JSON is checked on opening.)"""
    if checkpoint.layout != "hf" or not Path(checkpoint.path).is_dir():
        return []
    if checkpoint.config is None:
        return [problem("config", "is missing: no model can be built; --config-from DIR names another place",
                        file=Path(checkpoint.path) / "config.json")]  # fmt: skip
    if not isinstance(checkpoint.config.get("model_type"), str):
        return [problem("config", "has no model_type", file=Path(checkpoint.config_dir or "") / "config.json")]
    return []


def _levels(config: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    config = config or {}
    text = config.get("text_config")
    return (text, config) if isinstance(text, dict) else (config,)


def _count(config: Mapping[str, Any] | None, key: str) -> int | None:
    for level in _levels(config):
        value = level.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def check_layers(checkpoint: Checkpoint) -> list[Problem]:
    """Every decoder layer that the config counts is there; embedding and head of a causal model too (families only)."""
    family, config = find_family(checkpoint.config), checkpoint.config
    layers = _count(config, "num_hidden_layers")
    if family is None or layers is None or not checkpoint.tensors:
        return []
    pattern = re.compile(r"^(?:.*?\.)?" + re.escape(family.layers) + r"(\d{1,6})\.")
    present = {int(match[1]) for match in map(pattern.match, checkpoint.tensors) if match}
    if not present:
        return []  # not the family's names (a bare encoder, say): nothing is known
    found = []
    missing = [number for number in range(min(layers, len(present) + 100)) if number not in present]
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        where = f"{family.layers}{missing[0]}"
        found.append(problem("layers", f"of {layers} layers that the config counts, {listed} are absent", tensor=where))
    names: Collection[str] = checkpoint.tensors.keys()
    if family.embedding not in names or family.head not in names:
        names = {plain_name(name) for name in names}
    tied = declares_tie(config)
    classes = (config or {}).get("architectures")
    causal = isinstance(classes, list) and any("ForCausalLM" in str(name) for name in classes)
    head = family.head in names or any(name in names for name in HEADS)
    embedding = family.embedding in names or any(name in names for name in EMBEDDINGS)
    if not embedding and not (tied and head):
        found.append(problem("missing", "is missing", tensor=family.embedding))
    if causal and not head and not tied:
        found.append(
            problem("missing", "is missing, and the config does not tie it to the embedding", tensor=family.head)
        )
    return found


def check_experts(checkpoint: Checkpoint) -> tuple[list[Problem], list[str]]:
    """(problems, notes): every expert has every tensor and the config's number of them is there."""
    try:
        convert_experts(strip_wrappers(checkpoint.tensors), find_family(checkpoint.config), checkpoint.config, "hub")
    except Damaged as error:
        return [of_error(error)], []
    except ReshardError as error:
        return [], [error.line()]
    return [], []


def expert_layout(checkpoint: Checkpoint, family: Family | None) -> str | None:
    """The name of the layout that the routed experts are stored in; joined by "/" where names do not tell."""
    if family is None or family.experts is None:
        return None
    found = []
    for layout in family.experts.layouts:
        suffix = "." + layout.tensors[0].name.replace("{e}", "0")
        if any(name.endswith(suffix) for name in checkpoint.tensors):
            found.append(layout.name)
    return "/".join(found) or None
