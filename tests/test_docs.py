"""The documents: commands and flags exist, links lead somewhere, and no kind of error is left unexplained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from reshard.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`(reshard [^`]+)`")
LAUNCHERS = re.compile(r"^(?:torchrun .*? -m |python -m )(?=reshard )")

# Errors, and rows of "problems", with the kind as the first argument.
KIND = re.compile(r"\b(?:UsageError|Refused|Damaged|ReshardError|_fault|problem)\(\s*\"([a-z-]+)\"")

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def commands(text: str) -> list[str]:
    """Every `reshard ...` line of console and bash blocks, and every one in a line of text."""
    found = []
    for kind, body in FENCE.findall(text):
        if kind in ("console", "bash"):
            prompts = [line.strip() for line in body.splitlines() if kind == "bash" or line.startswith("$ ")]
            found += [LAUNCHERS.sub("", line.removeprefix("$ ")) for line in prompts]
    found += INLINE.findall(FENCE.sub("", text))
    return [line for line in found if re.match(r"reshard( |$)", line)]


def fault(line: str) -> str | None:
    """What is wrong with a command line, or None."""
    group = typer.main.get_command(app)
    words = shlex.split(line.split(" | ")[0])[1:]
    known = group.commands  # type: ignore[attr-defined]
    if not words or words[0].startswith("-"):
        options = {name for parameter in group.params for name in parameter.opts}
        return next((f"{word} is no flag of reshard" for word in words if word not in options), None)
    if words[0] not in known and words[0] != "COMMAND":
        return f"{words[0]} is no command"
    some = known.values() if words[0] == "COMMAND" else [known[words[0]]]
    options = {"--help", "-h"} | {name for command in some for parameter in command.params for name in parameter.opts}
    flags = [word.split("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
    return next((f"{flag} is no flag of {words[0]}" for flag in flags if flag not in options), None)


def anchors(text: str) -> set[str]:
    """The names that headings have as link targets, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_commands_exist(path: Path) -> None:
    wrong = {line: fault(line) for line in commands(path.read_text(encoding="utf-8"))}
    assert not {line: what for line, what in wrong.items() if what}


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.is_file() and place.is_relative_to(ROOT), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors(place.read_text(encoding="utf-8")), f"{target} names no heading"


@each_document
def test_flags_in_text_exist(path: Path) -> None:
    """Flags named alone, such as `--dtype keep`, belong to some command."""
    known = {
        name
        for command in typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
        for parameter in command.params
        for name in parameter.opts
    } | {"--help", "--version"}
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", path.read_text(encoding="utf-8")))
    named = {flag for span in spans for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", span)}
    assert not named - known


def test_every_kind_of_error_is_explained() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    told = {kind for row in re.findall(r"\[([a-z, -]+)\](?!\()", text) for kind in row.split(", ")}
    said = {kind for file in (ROOT / "src").rglob("*.py") for kind in KIND.findall(file.read_text(encoding="utf-8"))}
    assert len(said) > 40
    assert said <= told, f"not explained: {sorted(said - told)}"


def test_the_checks_see_faults() -> None:
    assert fault("reshard convert a b --frob") == "--frob is no flag of convert"
    assert fault("reshard quantise a") == "quantise is no command"
    assert fault("reshard verify a --dtype keep") == "--dtype is no flag of verify"
    assert fault("reshard convert a b --dtype bfloat16 | head -3") is None
    block = "```console\n$ torchrun --nproc-per-node 2 -m reshard convert a b\nwrote\n```\nand `reshard inspect a`\n"
    assert commands(block) == ["reshard convert a b", "reshard inspect a"]
    assert anchors("# The manifest, reshard.json\n") == {"the-manifest-reshardjson"}
