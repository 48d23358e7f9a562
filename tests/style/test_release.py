"""The version is in one place, and the files that have to repeat it agree with it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

from pyshim import __version__

from .project_files import ROOT, text

_FINAL = re.match(r"\d+\.\d+\.\d+", __version__)


def _semantic(version: str) -> str:
    """A version of Python packages (PEP 440) as Semantic Versioning writes it: 0.2.0.dev0 is 0.2.0-dev.0."""
    return re.sub(r"\.?(dev|rc)(\d+)$", r"-\1.\2", version)


def test_the_package_has_the_version_of_the_program() -> None:
    document = tomllib.loads(text(ROOT / "pyproject.toml"))

    assert "version" not in document["project"]
    assert document["project"]["dynamic"] == ["version"]
    assert document["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pyshim.__version__"}


def test_the_chart_has_the_version_of_the_program() -> None:
    chart = yaml.safe_load(text(ROOT / "configs" / "helm" / "pyshim" / "Chart.yaml"))

    assert (chart["version"], chart["appVersion"]) == (_semantic(__version__), __version__)


def test_the_guests_agent_has_the_version_of_the_program() -> None:
    agent = text(ROOT / "guest" / "agent" / "calls" / "sandbox.py")  # it runs in a guest only

    assert re.findall(r'(?m)^VERSION = "(.+)"$', agent) == [__version__]


def test_the_changelog_begins_with_the_version_and_dates_releases_only() -> None:
    version, date = re.findall(r"(?m)^## \[(.+)\] - (.+)$", text(ROOT / "CHANGELOG.md"))[0]

    assert _FINAL
    assert version == _FINAL[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d" if version == __version__ else "unreleased", date)


def test_every_file_has_a_licence() -> None:
    reuse = shutil.which("reuse")
    if reuse is None:
        pytest.skip("no program 'reuse' (hint: pipx install reuse)")

    done = subprocess.run([reuse, "--root", str(ROOT), "lint"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
