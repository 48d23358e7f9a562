"""The containerd of the integration tests: chosen by name, built once."""

import tomllib
from pathlib import Path

import pytest

from integration.framework import releases
from integration.framework.releases import RELEASES, Release

# Stands for the Go client: notes its arguments, and makes what `build` was to make, or fails at a word.
_GO = """#!/bin/sh
echo "$@" >> "$GO_CALLS"
case "$*" in *"${GO_FAILS:-nothing fails}"*) echo "go: downloading x v1" >&2; echo "no such version" >&2; exit 1;; esac
[ "$1" != build ] || touch bin/containerd bin/ctr bin/containerd-shim-runc-v2
"""


@pytest.fixture
def go_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every call of `go`, one in a line; the cache is the test's own."""
    program = tmp_path / "path" / "go"
    program.parent.mkdir()
    program.write_text(_GO)
    program.chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("GO_CALLS", str(calls))
    monkeypatch.setattr(releases, "CACHE", tmp_path / "cache")
    return calls


def test_debians_is_the_one_without_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINERD", raising=False)

    assert (releases.chosen().generation, releases.chosen().is_built) == ("1.6", False)


def test_an_unknown_choice_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINERD", "3.0")

    with pytest.raises(ValueError, match=r"choose containerd '3\.0': CONTAINERD is one of 1\.6, 1\.7, 2\.1, 2\.3"):
        releases.chosen()


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES.keys())
def test_configuration_and_shipped_drop_in_are_of_one_dialect(release: Release, tmp_path: Path) -> None:
    drop_in = tomllib.loads(release.drop_in.read_text())
    ours = tomllib.loads(release.cri_config(sandbox_image="pause", cni=tmp_path, nri=tmp_path / "nri"))

    assert drop_in.get("version", release.config_version) == release.config_version
    (handlers,) = drop_in["plugins"].keys()
    assert release.cri_table == f'plugins."{handlers}"'
    assert ours["plugins"][handlers]["cni"]["conf_dir"] == f"{tmp_path}/net.d"


def test_a_release_is_built_once(go_calls: Path) -> None:
    release = RELEASES["2.3"]

    releases.build(release)
    releases.build(release)

    module, version = "github.com/containerd/containerd/v2", release.version
    assert [line.split()[:2] for line in go_calls.read_text().splitlines()] == [
        ["mod", "init"],
        ["get", f"{module}/cmd/containerd@{version}"],
        ["build", "-trimpath"],
    ]
    assert sorted(path.name for path in release.programs.iterdir()) == ["containerd", "containerd-shim-runc-v2", "ctr"]


@pytest.mark.parametrize("step", ["get", "build"])
def test_a_failed_build_says_why_and_is_tried_again(go_calls: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    release = RELEASES["1.7"]
    monkeypatch.setenv("GO_FAILS", f"{step} ")

    with pytest.raises(ChildProcessError, match=rf"^go {step}: exit code 1: no such version$"):
        releases.build(release)
    assert not release.programs.exists()
    monkeypatch.delenv("GO_FAILS")
    releases.build(release)

    assert release.programs.exists()


def test_without_go_the_error_says_so(go_calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (go_calls.parent / "path" / "go").unlink()
    monkeypatch.setenv("PATH", str(go_calls.parent / "path"))

    with pytest.raises(FileNotFoundError, match=r"^build containerd v2\.1\.9: no program 'go' \(hint: install Go\)$"):
        releases.build(RELEASES["2.1"])
