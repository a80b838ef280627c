"""Run directories: which checkpoint a path stands for, and where its config and tokenizer come from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import Damaged, Refused, ReshardError
from reshard.trainers import all_trainers, parse_trainer, resolve_run


def dcp(path: Path, metadata: bytes = b"x") -> Path:
    """A directory that looks like a finished torch DCP save."""
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"data")
    (path / ".metadata").write_bytes(metadata)
    return path


def resolved(run: Path, config: dict[str, Any], name: str = "configs/resolved/trainer.json") -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(json.dumps(config))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 9 and 10 complete, 20 without its marker, 30 with an empty one."""
    run = tmp_path / "run"
    for step in (9, 10):
        dcp(run / f"checkpoints/step_{step}/trainer")
    dcp(run / "checkpoints/step_20/trainer")
    (run / "checkpoints/step_20/trainer/.metadata").unlink()
    dcp(run / "checkpoints/step_30/trainer", b"")
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    resolved(run, {"model": {"name": str(base), "lora": None}, "tokenizer": {"name": str(tmp_path / "absent")}})
    return run


def test_the_newest_complete_step_by_number_not_by_text(run: Path) -> None:
    found = resolve_run(run)
    assert found is not None
    assert found.checkpoint_dir == str(run / "checkpoints/step_10/trainer")
    assert found.step_dir == str(run / "checkpoints/step_10")
    assert found.trainer == "prime-rl"
    assert "step_10" in found.why and "step_20" in found.why and "step_30" in found.why and "step_9" not in found.why


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step_10", "checkpoints/step_10/trainer"])
def test_any_level_of_the_run_may_be_named(place: str, run: Path) -> None:
    found = resolve_run(run / place)
    assert found is not None
    assert found.checkpoint_dir == str(run / "checkpoints/step_10/trainer")
    assert found.config_dirs == (str(run.parent / "base"),)
    assert "configs/resolved/trainer.json" in found.why


def test_an_older_step_is_taken_when_named(run: Path) -> None:
    found = resolve_run(run / "checkpoints/step_9")
    assert found is not None and found.checkpoint_dir.endswith("step_9/trainer") and "newest" not in found.why


def test_a_link_to_the_run_leads_to_it(run: Path) -> None:
    link = run.parent / "link"
    link.symlink_to(run / "checkpoints/step_9/trainer")
    found = resolve_run(link)
    assert found is not None and found.trainer == "prime-rl" and found.step_dir == str(run / "checkpoints/step_9")


@pytest.mark.parametrize(
    "name", ["configs/resolved/sft.json", "configs/latest/resolved/trainer.json", "configs/latest/resolved/sft.json"]
)
def test_every_place_of_the_resolved_configuration(name: str, run: Path) -> None:
    (run / "configs/resolved/trainer.json").rename(run / "old.json")
    resolved(run, {"model": {"name": "../base"}, "tokenizer": {"name": None}}, name)
    found = resolve_run(run)
    assert found is not None and name in found.why
    assert [Path(path).resolve() for path in found.config_dirs] == [run.parent / "base"]
    assert found.tokenizer_dirs == found.config_dirs  # the model's, where no tokenizer is named


def test_the_tokenizer_of_its_own_comes_first(run: Path) -> None:
    (run.parent / "words").mkdir()
    names = {"model": {"name": str(run.parent / "base")}, "tokenizer": {"name": str(run.parent / "words")}}
    resolved(run, names)
    found = resolve_run(run)
    assert found is not None
    assert found.tokenizer_dirs == (str(run.parent / "words"), str(run.parent / "base"))


def test_a_hub_id_is_found_in_the_local_cache_and_never_fetched(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    cache = tmp_path / "cache"
    home = cache / "models--some--model"
    snapshot = home / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "blobs/1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (home / "refs").mkdir()
    (home / "refs/main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(cache), raising=False)
    resolved(run, {"model": {"name": "some/model"}, "tokenizer": {"name": "some/other"}})
    found = resolve_run(run)
    assert found is not None and found.config_dirs == (str(snapshot),)
    assert found.tokenizer_dirs == (str(snapshot),)


@pytest.mark.parametrize("name", ["", "a/b/c", "no/such", "-- --", "a" * 300 + "/b", None, 7])
def test_a_model_name_that_leads_nowhere_is_no_error(name: Any, run: Path) -> None:
    resolved(run, {"model": {"name": name}})
    found = resolve_run(run)
    assert found is not None and found.config_dirs == ()


@pytest.mark.parametrize("config", [{"model": {"lora": {"rank": 8}}}, {"lora": {"rank": 8}}, {"model": {"lora": {}}}])
def test_a_run_that_trains_an_adapter_is_refused_with_the_remedy(config: dict[str, Any], run: Path) -> None:
    resolved(run, config)
    with pytest.raises(Refused, match="merge the adapter"):
        resolve_run(run)


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "[" * 100_000])
def test_a_broken_configuration_is_named(text: str, run: Path) -> None:
    (run / "configs/resolved/trainer.json").write_text(text)
    with pytest.raises(Damaged, match=r"trainer\.json"):
        resolve_run(run)


def test_no_complete_step_names_them_all(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"run/checkpoints/step_{step}/trainer").mkdir(parents=True)
    with pytest.raises(Damaged, match=r"step_2, step_1 incomplete"):
        resolve_run(tmp_path / "run")


@pytest.mark.parametrize(
    "names",
    [
        ("checkpoint-9", "checkpoint-10"),
        ("global_step_9", "global_step_10"),
        ("global_step9", "global_step10"),
        ("step-9", "step-10"),
        ("epoch_0_step_9", "epoch_1_step_10"),
    ],
)
def test_steps_of_other_trainers(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        dcp(tmp_path / "run" / name)
    found = resolve_run(tmp_path / "run")
    assert found is not None and found.checkpoint_dir == str(tmp_path / "run" / names[1])
    assert found.trainer is None and names[1] in found.why
    assert resolve_run(tmp_path / "run" / names[0]) is None  # a plain checkpoint


def test_steps_with_a_folder_inside_in_a_folder_of_any_name(tmp_path: Path) -> None:
    dcp(tmp_path / "saved/step_5/trainer")
    found = resolve_run(tmp_path / "saved")
    assert found is not None and found.checkpoint_dir.endswith("saved/step_5/trainer") and found.trainer is None


def test_plain_checkpoints_are_left_to_the_layouts(tmp_path: Path) -> None:
    assert resolve_run(dcp(tmp_path / "plain")) is None
    (tmp_path / "empty").mkdir()
    assert resolve_run(tmp_path / "empty") is None
    assert resolve_run(tmp_path / "absent") is None
    model = tmp_path / "model"
    dcp(model / "checkpoints/step_1/trainer")
    (model / "model.safetensors").write_bytes(b"x")
    assert resolve_run(model) is None  # a model of its own, whatever else lies in its directory


def test_the_shipped_trainers_load() -> None:
    assert [trainer.name for trainer in all_trainers()] == ["prime-rl"]


@pytest.mark.parametrize(
    "old,new,says",
    [
        ('name = "prime-rl"', "", "lacks the field 'name'"),
        ('step = "step_"', 'step = "step_"\nother = 1', "unknown field 'other'"),
        ('step = "step_"', "step = 3", "step = 3"),
        ('lora = ["model.lora", "lora"]', 'lora = "lora"', "lora = 'lora'"),
        ('name = "prime-rl"', "name = ", "not TOML"),
    ],
)
def test_a_faulty_trainer_file_is_named_with_its_field(old: str, new: str, says: str) -> None:
    import reshard.trainers

    text = (Path(os.fspath(reshard.trainers.__file__)).parent / "prime_rl.toml").read_text()
    assert old in text
    with pytest.raises(ReshardError, match=r"odd\.toml") as fault:
        parse_trainer(text.replace(old, new), "odd.toml")
    assert says in fault.value.detail
