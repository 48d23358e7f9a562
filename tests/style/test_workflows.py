"""The workflows of public runners are valid and call verbs of make."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from .project_files import ROOT, text

_PINNED = re.compile(r"uses: ([\w.-]+/[\w.-]+@[0-9a-f]{40} # v[\d.]+|\./\.github/workflows/[\w-]+\.yml)$")
_WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_actionlint_finds_nothing() -> None:
    actionlint = shutil.which("actionlint")
    if actionlint is None:
        pytest.skip("no program 'actionlint' (hint: go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12)")

    done = subprocess.run([actionlint, *_WORKFLOWS], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_check_and_test_are_run() -> None:
    verbs = {verb for path in _WORKFLOWS for verb in re.findall(r"(?m)^ *- verb: (\S+)$", text(path))}

    assert verbs == {"check", "test"}


def test_every_action_is_named_by_its_commit() -> None:
    used = [line.strip() for path in _WORKFLOWS for line in text(path).splitlines() if "uses:" in line]

    assert used
    assert [line for line in used if not _PINNED.search(line)] == []


def test_the_files_of_a_release_are_made_of_a_tag_after_all_tests() -> None:
    release = yaml.safe_load(text(ROOT / ".github" / "workflows" / "release.yml"))

    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML's `on`
    assert release["permissions"] == {"contents": "read"}
    assert release["jobs"]["tests"] == {"uses": "./.github/workflows/tests.yml"}
    assert release["jobs"]["dist"]["needs"] == "tests"


def test_a_bug_report_asks_for_the_nodes_facts() -> None:
    form = yaml.safe_load(text(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml"))
    asked = {each.get("id"): each for each in form["body"]}

    assert "pyshim check --json" in asked["check"]["attributes"]["label"]
    assert asked["check"]["validations"]["required"]


def test_the_paths_of_owners_exist() -> None:
    lines = [line.split() for line in text(ROOT / ".github" / "CODEOWNERS").splitlines() if not line.startswith("#")]

    assert [path for path, *owners in lines if not owners or not list(ROOT.glob(path.lstrip("/").rstrip("/")))] == []
