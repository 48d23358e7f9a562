"""The verbs: each is explained by `make help`, none is a file, and the continuous integration calls `make test`
alone.
"""

from __future__ import annotations

import os
import re
import subprocess

from .project_files import ROOT

VERBS = {
    "help",
    "setup",
    "guest",
    "demo",
    "test",
    "test-forked",
    "check",
    "integration",
    "soak",
    "fmt",
    "protos",
    "bench",
    "bench-compare",
    "clean",
}
_MAKEFILE = (ROOT / "Makefile").read_text()


def _targets() -> set[str]:
    return set(re.findall(r"(?m)^([a-z][a-z-]*):", _MAKEFILE))


def test_the_verbs_are_these() -> None:
    assert _targets() == VERBS


def test_every_verb_is_explained_by_help() -> None:
    # Called by make itself, these tests inherit its flags, with which make says more than it is asked.
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    make = subprocess.run(["make", "help"], cwd=ROOT, env=outside, check=True, capture_output=True, text=True)
    listed = make.stdout
    explained = {line.split()[0] for line in listed.splitlines() if len(line.split()) > 1}

    assert explained == VERBS


def test_no_verb_is_mistaken_for_a_file() -> None:
    phony = re.search(r"(?m)^\.PHONY: (.*)$", _MAKEFILE)

    assert phony is not None
    assert set(phony.group(1).split()) == VERBS


def test_readme_names_the_commands_a_user_needs() -> None:
    readme = (ROOT / "README.md").read_text()

    assert "make demo" in readme
    assert "make test" in readme


def test_continuous_integration_calls_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]

    assert script.stat().st_mode & 0o111
    assert commands == ["set -e", 'cd "$(dirname "$0")/.."', "exec make test"]
