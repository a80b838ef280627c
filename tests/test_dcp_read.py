"""Reading real torch DCP saves, made by torchrun on gloo, against torch's own gather and torch's own loader."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard.errors import Damaged, Refused
from reshard.layouts import dcp as layout
from reshard.layouts.dcp import metadata
from reshard.layouts.dcp.metadata import MetadataMachine, load, scan
from reshard.layouts.options import OpenOptions

CASES = ("training", "placed", "threads", "files", "local", "flat", "stale")
pytestmark = pytest.mark.xdist_group("dcp_worlds")


def save_world(world: int, out: Path) -> Path:
    script = Path(__file__).with_name("dcp_worlds.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*command, str(script), str(out)], env=env, check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory):
    made: dict[int, Path] = {}

    def get(world: int) -> Path:
        if world not in made:
            made[world] = save_world(world, tmp_path_factory.mktemp(f"world{world}"))
        return made[world]

    return get


def open_dcp(path: Path, model_key: str | None = None):
    assert layout.detect(path)
    checkpoint = layout.open([path], OpenOptions(model_key=model_key))
    layout.check_items(checkpoint.tensors)
    return checkpoint


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if not want.dim():
        got, want = got.reshape(1), want.reshape(1)
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def check_all(checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint) == set(expected)
    for name, want in expected.items():
        assert same(checkpoint[name].torch(), want), name
        if want.dim() and len(want) > 2:
            assert same(checkpoint[name][1:3], want[1:3]), name


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_case_comes_back_bit_exact(worlds, world: int) -> None:
    out = worlds(world)
    for case in CASES:
        expected = torch.load(out / f"{case}.expected.pt")
        checkpoint = open_dcp(out / case)
        check_all(checkpoint, expected)
        assert checkpoint.layout == "dcp" and checkpoint.training
        assert all(Path(path).stat().st_size == size for path, size in checkpoint.files.items())


@pytest.mark.parametrize("case", ["placed", "training"])
def test_equals_what_torch_loads(worlds, case: str) -> None:
    path = worlds(3) / case
    checkpoint = open_dcp(path)
    prefix = "app.model." if case == "training" else "model."
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in stored.items()
        if key.startswith(prefix) and hasattr(item, "size")
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    check_all(checkpoint, {key.removeprefix(prefix): value for key, value in state.items()})


def test_left_out_and_warnings(worlds) -> None:
    out = worlds(2)
    left = {item.name: item.reason for item in open_dcp(out / "training").left_out}
    assert left["app.optimizers"].startswith("optimizer state (")
    assert left["app.progress"] == "training progress (2 items)"
    left = {item.name: item.reason for item in open_dcp(out / "placed").left_out}
    assert left["model.layers.0._extra_state"] == "a nested value, not a parameter (1 item)"
    assert left["model.layers.1._extra_state"] == "not a tensor"
    assert {item.name for item in open_dcp(out / "flat").left_out} == {"optimizer"}
    stale = open_dcp(out / "stale")
    assert len(stale.warnings) == 1 and "__0_2.distcp" in stale.warnings[0]
    assert not any(path.endswith("_2.distcp") for path in stale.files)


def entries(meta) -> dict:
    return {
        name: (entry.dtype, entry.shape, sorted((entry.box(i), place(meta, entry, i)) for i in range(len(entry))))
        for name, entry in meta.tensors.items()
    }


def place(meta, entry, i: int) -> tuple[str, int, int]:
    number, offset, length = entry.place(i)
    return meta.files[number], offset, length


@pytest.mark.parametrize("world", [1, 3])
def test_metadata_equals_the_unpickled_object(
    worlds, world: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The look-ahead, the plain machine and the two-pass way give what pickle.load gives, in every protocol."""
    out = worlds(world)
    for case in CASES:
        if case == "local":
            continue
        source = pickle.loads((out / case / ".metadata").read_bytes())
        for protocol in (None, 2, 3, 4, 5):
            file = tmp_path / f"{case}{protocol}"
            if protocol is None:
                shutil.copy(out / case / ".metadata", file)
            else:
                file.write_bytes(pickle.dumps(source, protocol=protocol))
            monkeypatch.setattr(metadata, "SMALL", 64 << 20)
            meta, full = scan(str(file))
            assert full and set(meta.files) == {info.relative_path for info in source.storage_data.values()}
            expected = {}
            for name, item in source.state_dict_metadata.items():
                if not hasattr(item, "size"):
                    assert name in meta.bytes_items
                    continue
                rows = []
                for chunk in item.chunks:
                    info = source.storage_data[dcp.metadata.MetadataIndex(name, chunk.offsets)]
                    where = (info.relative_path, info.offset, info.length)
                    rows.append(((tuple(chunk.offsets), tuple(chunk.sizes)), where))
                expected[name] = (meta.tensors[name].dtype, tuple(item.size), sorted(rows))
                assert getattr(torch, str(item.properties.dtype).removeprefix("torch.")) == item.properties.dtype
            assert entries(meta) == expected
            assert meta.paths == source.planner_data
            with file.open("rb") as stream:
                size = file.stat().st_size
                plain = MetadataMachine(str(file), stream.fileno(), size, None, everything=True).result()
            assert entries(plain) == expected
            monkeypatch.setattr(metadata, "SMALL", 0)
            listing, full = scan(str(file))
            assert not full and listing.paths == source.planner_data and not any(map(len, listing.tensors.values()))
            kept = list(expected)[::2]
            chunks = load(str(file), kept)
            assert entries(chunks).keys() == expected.keys()
            assert {name: entries(chunks)[name] for name in kept} == {name: expected[name] for name in kept}
            assert not any(len(entry) for name, entry in chunks.tensors.items() if name not in kept)


def test_rank_metadata_missing(worlds, tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        copy = tmp_path / str(rank)
        shutil.copytree(worlds(3) / "local", copy)
        (copy / f"__{rank}.metadata").unlink()
        with pytest.raises(Damaged, match=rf"no __{rank}\.metadata"):
            layout.open([copy], OpenOptions())


def test_rank_metadata_over_several_directories(worlds, tmp_path: Path) -> None:
    source = worlds(3) / "local"
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    for file in source.iterdir():
        shutil.copy(file, nodes[file.name.startswith("__2")])
    checkpoint = layout.open(nodes, OpenOptions())
    check_all(checkpoint, torch.load(worlds(3) / "local.expected.pt"))


def test_truncated_data_is_found_before_reading(worlds, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(worlds(2) / "placed", copy)
    file = copy / "__1_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(Damaged, match=r"__1_0\.distcp.*bytes where the metadata needs"):
        layout.open([copy], OpenOptions())
    file.unlink()
    with pytest.raises(Damaged, match=r"__1_0\.distcp.*absent"):
        layout.open([copy], OpenOptions())
    (copy / ".metadata").unlink()
    assert layout.detect(copy)
    with pytest.raises(Damaged, match="did not complete"):
        layout.open([copy], OpenOptions())
    (copy / ".metadata").touch()
    with pytest.raises(Damaged, match=r"\.metadata: is empty"):
        layout.open([copy], OpenOptions())


def test_data_of_another_save_is_found_by_check_items(worlds, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(worlds(2) / "placed", copy)
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    (copy / "__0_0.distcp").write_bytes(data[1:] + b"\0")
    checkpoint = layout.open([copy], OpenOptions())
    with pytest.raises(Damaged, match=r"__0_0\.distcp \(layers"):
        layout.check_items(checkpoint.tensors)


def test_links(worlds, tmp_path: Path) -> None:
    source = worlds(1) / "placed"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).symlink_to(file)
    with pytest.raises(Refused, match="link out of the directory"):
        layout.open([copy], OpenOptions())
    # A whole directory may be reached by a link.
    (tmp_path / "link").symlink_to(source)
    assert len(layout.open([tmp_path / "link"], OpenOptions())) > 10


def test_model_key(worlds) -> None:
    path = worlds(2) / "training"
    assert set(open_dcp(path, "app.model")) == set(open_dcp(path))
    with pytest.raises(Refused, match=r"--model-key takes one of: app\.model"):
        open_dcp(path, "app.ema")


def test_torch_is_not_imported(worlds) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from reshard.layouts import dcp; from reshard.layouts.options import OpenOptions\n"
        "c = dcp.open([Path(sys.argv[1])], OpenOptions()); dcp.check_items(c.tensors)\n"
        "assert all(len(t.tobytes()) == t.nbytes for t in c.values())\n"
        "assert 'torch' not in sys.modules and 'numpy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(worlds(1) / "placed")], check=True)
