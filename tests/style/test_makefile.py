"""Each verb is explained by `make help` and none is a file; the continuous integration calls `make test` alone."""

from __future__ import annotations

import os
import re
import subprocess

from .project_files import ROOT, text

_MAKEFILE = text(ROOT / "Makefile")
_VERBS = set(re.findall(r"(?m)^([a-z][a-z-]*):", _MAKEFILE))


def test_every_verb_is_explained_by_help() -> None:
    # Called by make itself, these tests inherit its flags, with which make says more than it is asked.
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    make = subprocess.run(["make", "help"], cwd=ROOT, env=outside, check=True, capture_output=True, text=True)
    explained = {line.split()[0] for line in make.stdout.splitlines() if len(line.split()) > 1}

    assert explained == _VERBS


def test_no_verb_is_mistaken_for_a_file() -> None:
    phony = re.search(r"(?m)^\.PHONY: (.*)$", _MAKEFILE)

    assert phony is not None
    assert set(phony.group(1).split()) == _VERBS


def test_continuous_integration_calls_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]

    assert script.stat().st_mode & 0o111
    assert commands == ["set -e", 'cd "$(dirname "$0")/.."', "exec make test"]


def test_make_peers_lists_its_words_when_none_is_given() -> None:
    defined = re.findall(r"(?m)^([a-z0-9-]+)\(\) \{ # \S", text(ROOT / "scripts" / "peers"))
    asked = subprocess.run([ROOT / "scripts" / "peers"], capture_output=True, text=True, check=False)

    assert (asked.returncode, asked.stdout) == (2, "")
    assert [line.split()[0] for line in asked.stderr.splitlines()[1:]] == defined != []
