"""Trainers as data: where each puts its checkpoints in a run directory, and where config and tokenizer are found."""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from reshard.errors import Damaged, Refused, ReshardError

# A step directory of any trainer; the last number is the step.
STEP = re.compile(r"(?:checkpoint|global_step|step|iter|epoch_\d+_step)[-_]?(\d+)")
# A step that holds one of these, not empty, is complete: each is written last.
MARKERS = (".metadata", "model.safetensors", "model.safetensors.index.json")
WEIGHTS = (".safetensors", ".distcp", ".metadata")
ADAPTER_REMEDY = "merge the adapter into the model in the trainer and save again, or export it as a PEFT adapter"
MAX_CONFIG = 64 << 20


@dataclass(frozen=True)
class Trainer:
    """One trainer's run directory.

    checkpoints: folder of the run that holds the steps; step: prefix of a step's folder; inner: folder inside it.
    resolved: files of the run that hold its resolved configuration, the first present counts. model, tokenizer:
    dotted keys in it that name a model directory or Hub id. lora: dotted keys that are set when the run trains an
    adapter.
    """

    name: str
    checkpoints: str
    step: str
    inner: str
    resolved: tuple[str, ...]
    model: tuple[str, ...]
    tokenizer: tuple[str, ...]
    lora: tuple[str, ...]


@dataclass(frozen=True)
class RunPaths:
    """What a path turned out to be: the checkpoint directory, and where else to look. why: one line for people."""

    checkpoint_dir: str
    step_dir: str
    trainer: str | None = None
    config_dirs: tuple[str, ...] = ()
    tokenizer_dirs: tuple[str, ...] = ()
    why: str = ""


def parse_trainer(text: str, where: str) -> Trainer:
    """A trainer from TOML. Raises ReshardError naming the file and the field."""
    try:
        row = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ReshardError("trainer", where, f"is not TOML ({error})") from error
    known = {field.name: str(field.type) for field in fields(Trainer)}
    if set(row) != set(known):
        odd = sorted(set(row) ^ set(known))[0]
        raise ReshardError("trainer", where, f"{'lacks the' if odd in known else 'has the unknown'} field {odd!r}")
    values: dict[str, Any] = {}
    for key, value in row.items():
        texts = value if isinstance(value, list) else [value]
        if isinstance(value, list) != known[key].startswith("tuple") or not all(
            isinstance(text, str) for text in texts
        ):
            raise ReshardError("trainer", where, f"has {key} = {value!r}, which must be {known[key]}")
        values[key] = tuple(value) if isinstance(value, list) else value
    return Trainer(**values)


@cache
def all_trainers() -> tuple[Trainer, ...]:
    """Every trainer that ships, by name."""
    found = [
        parse_trainer(entry.read_text(encoding="utf-8"), entry.name)
        for entry in files("reshard.trainers").iterdir()
        if entry.name.endswith(".toml")
    ]
    return tuple(sorted(found, key=lambda trainer: trainer.name))


def resolve_run(path: Path) -> RunPaths | None:
    """The checkpoint that `path` stands for, when it is (part of) a run directory; None when it is a plain checkpoint.

    Accepts a run (its newest complete step is taken, by number), the folder of its steps, a step, or the folder inside
    a step. Raises Refused when the run trains an adapter, Damaged when its configuration cannot be read or no step is
    complete.
    """
    if not path.is_dir():
        return None
    path = Path(path.resolve())
    for trainer in all_trainers():
        found = _of_trainer(path, trainer)
        if found is not None:
            return found
    if _is_checkpoint(path):
        return None
    for inner in ("", *(trainer.inner for trainer in all_trainers())):
        newest, skipped = _newest(path, "", inner)
        if newest is not None:
            return RunPaths(str(newest / inner), str(newest), why=_why(newest, skipped))
        if inner:
            _refuse_incomplete(path, [name for name in skipped if (path / name / inner).is_dir()])
    return None


def _is_checkpoint(path: Path) -> bool:
    return any(entry.suffix in WEIGHTS or entry.name in MARKERS for entry in path.iterdir())


def _is_step(path: Path, trainer: Trainer) -> bool:
    return path.name.startswith(trainer.step) and STEP.fullmatch(path.name) is not None


def _of_trainer(path: Path, trainer: Trainer) -> RunPaths | None:
    why = ""
    if path.name == trainer.inner and _is_step(path.parent, trainer):
        step = path.parent
    elif _is_step(path, trainer) and (path / trainer.inner).is_dir():
        step = path
    else:
        steps = path if path.name == trainer.checkpoints else path / trainer.checkpoints
        if not steps.is_dir() or _is_checkpoint(path):
            return None
        newest, skipped = _newest(steps, trainer.step, trainer.inner)
        if newest is None:
            _refuse_incomplete(steps, [name for name in skipped if (steps / name / trainer.inner).is_dir()])
            return None
        step, why = newest, _why(newest, skipped)
    inner = step / trainer.inner
    run = step.parent.parent if step.parent.name == trainer.checkpoints else None
    resolved = next((run / name for name in trainer.resolved if (run / name).is_file()), None) if run else None
    if run is None or resolved is None:
        return RunPaths(str(inner), str(step), why=why)
    config = _read(resolved)
    for key in trainer.lora:
        if _get(config, key) not in (None, False):
            raise Refused("adapter", str(resolved), f"says that the run trains an adapter ({key})", ADAPTER_REMEDY)
    reason = f"{trainer.name}: configuration in {resolved.relative_to(run)}"
    return RunPaths(
        str(inner),
        str(step),
        trainer.name,
        tuple(_directories(config, trainer.model, run)),
        tuple(_directories(config, trainer.tokenizer, run)),
        f"{reason}; {why}" if why else reason,
    )


def _newest(directory: Path, prefix: str, inner: str) -> tuple[Path | None, list[str]]:
    """(the step with the highest number that is complete, names of newer ones that are not)."""
    steps = []
    for path in directory.iterdir():
        match = STEP.fullmatch(path.name)
        if match and path.is_dir() and path.name.startswith(prefix):
            steps.append((int(match[1]), path.name, path))
    skipped: list[str] = []
    for _, _, path in sorted(steps, reverse=True):
        place = path / inner if inner else path
        if any((place / name).is_file() and (place / name).stat().st_size > 0 for name in MARKERS):
            return path, skipped
        skipped.append(path.name)
    return None, skipped


def _why(newest: Path, skipped: list[str]) -> str:
    text = f"{newest.name} is the newest complete step"
    return f"{text} ({', '.join(skipped)} incomplete)" if skipped else text


def _refuse_incomplete(directory: Path, skipped: list[str]) -> None:
    if skipped:
        raise Damaged("incomplete", str(directory), f"holds no complete step ({', '.join(skipped)} incomplete)")


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG:
            raise Damaged("config", str(path), "is too large for a configuration")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged("config", str(path), "is not readable JSON") from error
    if not isinstance(value, dict):
        raise Damaged("config", str(path), "is not a JSON object")
    return value


def _get(config: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _directories(config: dict[str, Any], keys: tuple[str, ...], run: Path) -> list[str]:
    """Directories that the configuration names: as given, relative to the run, or in the local hub cache."""
    found = []
    for key in keys:
        name = _get(config, key)
        if isinstance(name, str) and name and "\0" not in name:
            candidates = [run / name, Path(name)]
            place = next((p for p in candidates if os.path.isdir(p)), None) or _cached(name)
            if place is not None:
                found.append(str(place))
    return list(dict.fromkeys(found))


def _cached(name: str) -> Path | None:
    """The snapshot of a Hub id in the local cache; nothing is fetched."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
