"""The workflows of public runners are valid and call verbs of make."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from .project_files import ROOT, text

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
