"""The demo: its task, what its training leaves on disk, how it fails, and once the whole of it."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from reshard.demo import run as demo_run
from reshard.demo import run_demo
from reshard.demo.task import EOS, LONGEST, SHORTEST, accuracy, answers, batch, held_out, write_tokenizer
from reshard.errors import Damaged, Refused, ReshardError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    out = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(out)
    return AutoTokenizer.from_pretrained(str(out))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The run directory of a training of two steps on two ranks."""
    root = tmp_path_factory.mktemp("demo")
    lines: list[str] = []
    demo_run._Demo(root, lines.append).train(2)
    assert any("step    2" in line for line in lines)
    return root / "run"


class Reverser:
    """A stand-in model that reverses perfectly, or forgets the last letter."""

    def __init__(self, tokenizer, forgets: bool = False) -> None:
        self.tokenizer, self.forgets = tokenizer, forgets

    def __call__(self, input_ids, use_cache):
        class Output:
            logits = torch.zeros(*input_ids.shape, 259)

        for row, text in enumerate(self.tokenizer.batch_decode(input_ids)):
            prompt, _, reply = text.partition("|")
            wanted = prompt[::-1] + EOS
            if self.forgets:
                wanted = prompt[:0:-1] + EOS * 2
            following = self.tokenizer(wanted)["input_ids"][len(self.tokenizer(reply)["input_ids"])]
            Output.logits[row, -1, following] = 1
        return Output


def test_held_out_strings_are_fixed_and_never_trained_on(tokenizer) -> None:
    strings = held_out()
    assert strings == held_out() and len(set(strings)) == len(strings) == 300
    assert {len(text) for text in strings} == set(range(SHORTEST, LONGEST + 1))
    source = random.Random(0)
    # Bar all strings that the first draw would give: none of them may come up.
    ids, _ = batch(source, tokenizer, 8, frozenset())
    drawn = frozenset(text.partition("|")[0] for text in tokenizer.batch_decode(ids))
    ids, labels = batch(random.Random(0), tokenizer, 8, drawn)
    again = tokenizer.batch_decode(ids)
    assert not drawn & {text.partition("|")[0] for text in again}
    for text, row in zip(again, labels, strict=True):
        prompt, _, reply = text.partition("|")
        assert reply == prompt[::-1] + EOS
        assert tokenizer.decode(row[row >= 0]) == reply


def test_decoding_and_accuracy(tokenizer) -> None:
    strings = ["abcd", "xyzxyz", "aaaa", "qwertyui"]
    replies = answers(Reverser(tokenizer), tokenizer, strings)
    assert replies == ["dcba<eos>", "zyxzyx<eos>", "aaaa<eos>", "iuytrewq<eos>"]
    assert accuracy(strings, replies) == 1
    assert accuracy(strings, answers(Reverser(tokenizer, forgets=True), tokenizer, strings)) == 0
    assert accuracy(strings, [*replies[:3], "iuytrewq"]) == 0.75


def test_training_leaves_a_run_directory_of_the_trainers_kind(trained) -> None:
    checkpoint = trained / "checkpoints" / "step_2" / "trainer"
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    keys = metadata.state_dict_metadata
    fused = keys["app.model.model.layers.0.mlp.experts.gate_up_proj"]
    assert fused.size == (4, 128, 64) and len(fused.chunks) == 2 and fused.properties.dtype == torch.float32
    embedding = keys["app.model.model.embed_tokens.weight"]
    assert [chunk.sizes[0] for chunk in embedding.chunks] == [130, 129]
    assert "app.optimizers.state.lm_head.weight.exp_avg" in keys
    assert {"app.progress.step", "app.progress.total_tokens", "app.progress.total_samples"} <= keys.keys()
    assert any(key.startswith("app.scheduler.") for key in keys)
    assert metadata.planner_data["app.model.lm_head.weight"] == ("app", "model", "lm_head.weight")
    assert len(list(checkpoint.glob("*.distcp"))) == 2
    resolved = json.loads((trained / "configs" / "resolved" / "trainer.json").read_text())
    assert (trained / resolved["model"]["name"] / "config.json").is_file()
    assert (trained / resolved["tokenizer"]["name"] / "tokenizer.json").is_file()


def test_saved_weights_are_the_ones_scored(trained, tmp_path) -> None:
    """The bf16 answers come from the weights that DCP saved: read back by torch, cast, and asked again."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    dcp_to_torch_save(str(trained / "checkpoints" / "step_2" / "trainer"), str(tmp_path / "all.pt"))
    weights = torch.load(tmp_path / "all.pt", weights_only=False)["app"]["model"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(trained / "base")), dtype=torch.bfloat16)
    model.load_state_dict({name: tensor.bfloat16() for name, tensor in weights.items()})
    scores = json.loads((trained / "scores.json").read_text())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        replies = answers(model.eval(), AutoTokenizer.from_pretrained(str(trained / "base")), held_out())
    finally:
        torch.set_num_threads(threads)
    assert replies == scores["bfloat16"]["answers"]
    assert len(set(replies)) > 1
    assert scores["step"] == 2 and scores["ranks"] == 2


def test_a_missing_extra_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr(demo_run.importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(UsageError) as caught:
        run_demo()
    assert caught.value.line() == "demo: needs torch; pip install 'reshard[torch,hf]'"


def test_the_demo_module_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, reshard.demo; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_directory_in_use_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refused, match="already exists"):
        run_demo(tmp_path)
    assert (tmp_path / "file").read_text() == "x"


def test_a_failing_command_fails_the_demo(tmp_path) -> None:
    lines: list[str] = []
    demo = demo_run._Demo(tmp_path, lines.append)
    with pytest.raises(ReshardError, match="exit status 7"):
        demo.python(["-c", "print('said'); raise SystemExit(7)"], "some command")
    assert lines == ["  $ some command", "    said"]


def test_one_different_answer_fails_the_demo(tmp_path, monkeypatch) -> None:
    demo = demo_run._Demo(tmp_path, lambda line: None)
    replies = [text[::-1] + EOS for text in held_out()]
    scores = {"bfloat16": {"answers": replies}}
    export = demo_run.EXPORTS[0]
    (tmp_path / "step" / export.folder).mkdir(parents=True)
    monkeypatch.setattr(demo, "python", lambda arguments, shown: None)
    score = tmp_path / f"score-{export.folder}.json"
    score.write_text(json.dumps({"accuracy": 1.0, "answers": replies}))
    assert demo.export(export, "step", scores)["equal"]
    score.write_text(json.dumps({"accuracy": 1.0, "answers": ["x", *replies[1:]]}))
    with pytest.raises(Damaged, match=f"1 strings unlike the live model at bfloat16, {held_out()[0]} first"):
        demo.export(export, "step", scores)


def test_the_temporary_directory_goes_away(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(demo_run.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo_run._Demo, "run", lambda self, steps: (self.root / "left").write_text("x") and {})
    run_demo()
    assert not list(tmp_path.iterdir())
    run_demo(keep=True)
    assert len(list(tmp_path.glob("*/left"))) == 1


@pytest.mark.demo
def test_the_whole_demo(tmp_path) -> None:
    lines: list[str] = []
    figures = run_demo(tmp_path / "out", echo=lines.append)
    assert figures["accuracy"]["float32"] >= 0.95
    (export,) = figures["exports"]
    assert export["equal"] and export["accuracy"] == figures["accuracy"]["bfloat16"] >= 0.9
    assert figures["seconds"] < 240
    text = "\n".join(lines)
    for command in ("reshard inspect", "reshard convert", "reshard verify", "--load"):
        assert f"$ {command}" in text or command in text
    out = tmp_path / "out" / export["out"]
    names = json.loads((out / "reshard.json").read_text())["tensors"]
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert not [name for name in names if "gate_up_proj" in name]
