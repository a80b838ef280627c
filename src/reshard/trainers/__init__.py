"""Trainers as data: where each puts its checkpoints in a run directory, and where config and tokenizer are found."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from reshard.errors import Damaged, Refused

# A step directory of any trainer; the last number is the step.
STEP = re.compile(r"^(?:checkpoint|global_step|step|iter|epoch_\d+_step)[-_]?(\d+)$")
MARKERS = (".metadata", "model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class Trainer:
    """checkpoints: folder of the run that holds the steps; step: prefix of a step's folder; inner: folder inside it.

    resolved: files of the run that hold its resolved configuration. model, tokenizer: dotted keys in it that name a model
    directory or Hub id. lora: dotted keys that are set when the run trains an adapter.
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


@cache
def all_trainers() -> tuple[Trainer, ...]:
    found = []
    for entry in sorted(files(__package__).iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            row: dict[str, Any] = tomllib.loads(entry.read_text(encoding="utf-8"))
            found.append(Trainer(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}))
    return tuple(found)


def resolve_run(path: Path) -> RunPaths | None:
    """The checkpoint that `path` stands for, when it is (part of) a run directory; None when it is a plain checkpoint.

    Accepts a run (its newest complete step is taken), a step, or the folder inside a step. Raises Refused when the run
    trains an adapter, Damaged when its configuration cannot be read.
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
    newest, skipped = _newest(path, "", "")
    if newest is None:
        return None
    return RunPaths(str(newest), str(newest), why=_why(newest, skipped))


def _is_checkpoint(path: Path) -> bool:
    return any((path / marker).exists() for marker in MARKERS) or any(
        p.suffix in (".safetensors", ".distcp") for p in path.iterdir()
    )


def _of_trainer(path: Path, trainer: Trainer) -> RunPaths | None:
    why = ""
    if trainer.inner and path.name == trainer.inner and path.parent.name.startswith(trainer.step):
        step, inner = path.parent, path
    elif path.name.startswith(trainer.step) and (path / trainer.inner).is_dir():
        step, inner = path, path / trainer.inner
    elif (path / trainer.checkpoints).is_dir():
        newest, skipped = _newest(path / trainer.checkpoints, trainer.step, trainer.inner)
        if newest is None:
            return None
        step, inner = newest, newest / trainer.inner
        why = _why(newest, skipped)
    else:
        return None
    run = step.parent.parent if step.parent.name == trainer.checkpoints else None
    resolved = next((run / name for name in trainer.resolved if (run / name).is_file()), None) if run else None
    if run is None or resolved is None:
        return RunPaths(str(inner), str(step), why=why)
    config = _read(resolved)
    for key in trainer.lora:
        if _get(config, key):
            raise Refused(
                "adapter", str(resolved), f"says that the run trains an adapter ({key})",
                "merge the adapter into the model in the trainer and save again, or save it as a PEFT adapter",
            )  # fmt: skip
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
        match = STEP.match(path.name)
        if match and path.is_dir() and path.name.startswith(prefix):
            steps.append((int(match[1]), path))
    skipped = []
    for _, path in sorted(steps, reverse=True):
        place = path / inner if inner else path
        marker = next((place / name for name in MARKERS if (place / name).exists()), None)
        if marker is not None and marker.stat().st_size > 0:
            return path, skipped
        skipped.append(path.name)
    return None, skipped


def _why(newest: Path, skipped: list[str]) -> str:
    text = f"{newest.name} is the newest complete step"
    return f"{text} ({', '.join(skipped)} incomplete)" if skipped else text


def _read(path: Path) -> dict[str, Any]:
    try:
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
        if isinstance(name, str) and name:
            candidates = [run / name, Path(name)]
            place = next((p for p in candidates if p.is_dir()), None) or _cached(name)
            if place is not None:
                found.append(str(place))
    return list(dict.fromkeys(found))


def _cached(name: str) -> Path | None:
    """The snapshot of a Hub id in the local cache; nothing is fetched."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None
