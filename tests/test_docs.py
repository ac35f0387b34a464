"""The commands of README and docs exist, and so do their flags."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import yaml

from distaff.cli import COMMANDS, find_command
from distaff.tasks._cluster_flags import ClusterFlags
from distaff.tasks.fit import FitFlags

HOUSE = Path(__file__).parents[1]
PAGES = [HOUSE / "README.md", *sorted((HOUSE / "docs").glob("*.md"))]
OF_ALL = {"debug", "no_hugepages", "help"}


def lists(tree):
    """All lists of words in what a YAML file holds."""
    if isinstance(tree, list) and tree and all(isinstance(word, str) for word in tree):
        yield tree
    elif isinstance(tree, list | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from lists(part)


def commands(text):
    """The words of each `distaff COMMAND ...` of a page, in code blocks and in sentences."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for kind, block in blocks:
        if kind == "python":
            continue
        if kind == "yaml":
            yield from (words[1:] for words in lists(yaml.safe_load(block)) if words[0] == "distaff")
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for found in re.findall(r"(?<![\w/-])distaff ([a-z][^\n|;>]*)", line):
                yield re.split(r"[\s\"']+", found)
    for inline in re.findall(
        r"`distaff ([a-z][^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    ):
        yield re.split(r"[\s\"']+", inline)


def flags_of(name):
    command = COMMANDS[name]
    known = dataclasses.fields(getattr(importlib.import_module(command.module), command.flags))
    names = {field.name for field in known} | OF_ALL | {f"no_{field.name}" for field in known}
    further = {"train": ClusterFlags, "eval": ClusterFlags, "fit": FitFlags}.get(name[0])
    fields = () if further is None else dataclasses.fields(further)
    return names | {field.name for field in fields} | {f"no_{field.name}" for field in fields}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page):
    groups = {name[0] for name in COMMANDS if len(name) > 1}
    for words in commands(page.read_text()):
        if words[0] in groups and (len(words) == 1 or not words[1].isalpha()):
            continue  # 'distaff train' as such
        name, _ = find_command(words)
        flags = {word.split("=")[0].strip(",.()") for word in words if word.startswith("--")}
        assert {flag.removeprefix("--") for flag in flags} <= flags_of(name), (page.name, words)


def test_what_is_imported_is_there():
    text = "".join(page.read_text() for page in PAGES)
    found = re.findall(r"^from (distaff[\w.]*) import (.+)$", text, re.MULTILINE)
    assert len(found) >= 2
    for module, names in found:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), (module, name)


def test_what_is_looked_at():
    text = "Try `distaff train\nclm --x 1` or\n```sh\nsrun distaff eval clm \\\n  --y 2 > log\n```\n```yaml\na: [{b: [distaff, push, --z]}]\n```\n"
    assert list(commands(text)) == [
        ["eval", "clm", "--y", "2", ""],
        ["push", "--z"],
        ["train", "clm", "--x", "1"],
    ]
    assert len(list(commands((HOUSE / "docs" / "cluster.md").read_text()))) > 8
