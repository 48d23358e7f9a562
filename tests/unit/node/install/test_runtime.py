"""The node's container runtime, and the commands for containerd and systemd."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.model.errors import FailedPrecondition, Unavailable
from pyshim.node.install import running, runtime
from pyshim.node.install.runtime import effective

_CONTAINERD = """#!/bin/sh
# As containerd 1.7, which has no dump of a file that is not there.
case $* in
"config default") echo 'from = "the defaults"' ;;
"--config $2 config dump") [ -e "$2" ] && echo 'from = "the file"' ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def containerd(tmp_path: Path) -> str:
    program = tmp_path / "containerd"
    program.write_text(_CONTAINERD)
    program.chmod(0o755)
    return str(program)


def test_a_node_without_a_configuration_has_containerds_defaults(containerd: str, tmp_path: Path) -> None:
    """As on Ubuntu, whose package brings no config.toml."""
    assert effective(containerd, str(tmp_path / "config.toml")) == {"from": "the defaults"}


def test_a_file_is_read_with_its_imports_by_containerd_itself(containerd: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()

    assert effective(containerd, str(tmp_path / "config.toml")) == {"from": "the file"}


def test_a_refusal_of_containerd_is_named(containerd: str, tmp_path: Path) -> None:
    Path(containerd).write_text("#!/bin/sh\necho 'invalid plugin' >&2; exit 1\n")
    (tmp_path / "config.toml").touch()

    with pytest.raises(FailedPrecondition, match="invalid plugin"):
        effective(containerd, str(tmp_path / "config.toml"))


@pytest.mark.parametrize(
    ("files", "programs", "socket", "unit"),
    [
        (["run/containerd/containerd.sock"], [], "", "containerd"),
        (["run/crio/crio.sock"], [], "", "crio"),
        (["run/crio/crio.sock", "run/containerd/containerd.sock"], ["containerd"], "", "crio"),
        (["etc/crio/crio.conf"], [], "", "crio"),
        (["etc/crio/crio.conf"], ["containerd"], "", "containerd"),
        ([], ["crio"], "", "crio"),
        ([], ["containerd", "crio"], "", "containerd"),
        ([], [], "", "containerd"),
        (["run/crio/crio.sock"], [], "/run/x/containerd.sock", "containerd"),
        (["run/containerd/containerd.sock"], [], "/var/run/crio/crio.sock", "crio"),
    ],
)
def test_the_container_runtime_is_the_one_of_the_socket_or_of_the_node(
    files: list[str], programs: list[str], socket: str, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*files, *(f"bin/{program}" for program in programs)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")

    found = runtime.container_runtime(socket, root=str(tmp_path))

    assert found.unit == unit
    assert found.socket == (socket or f"/run/{unit}/{unit}.sock")


def test_a_runtime_that_does_not_listen_is_named(tmp_path: Path) -> None:
    caller = runtime.container_runtime(f"{tmp_path}/crio.sock")

    with pytest.raises(Unavailable, match=r"connect to CRI-O at '/.*crio.sock': No such file"):
        runtime.require_answer(caller)


_SYSTEMCTL = """#!/bin/sh
# As systemd 255, of which the states are files here: UNIT.loaded, UNIT.active.
cd {states}
[ $1 = show ] || echo "$*" >>asked
case $1 in
show)
    [ -e "$3.loaded" ] && echo LoadState=loaded || echo LoadState=not-found
    [ -e "$3.active" ] && echo ActiveState=active || echo ActiveState=inactive ;;
restart | try-restart)
    [ -e "$2.loaded" ] || {{ echo "Unit $2 not found." >&2; exit 5; }} ;;
stop)
    [ -e "$2.loaded" ] || [ -e "$2.active" ] || {{ echo "Unit $2 not loaded." >&2; exit 5; }}
    rm -f "$2.active" ;;
esac
"""
_TIMER, _ZYGOTE = "pyshim-cleanup.timer", "pyshim-zygote.service"
_NRI, _MONITOR = "pyshim-nri.service", "pyshim-monitor.service"


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The states of units."""
    (tmp_path / "states").mkdir()
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(_SYSTEMCTL.format(states=tmp_path / "states"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(running, "_SYSTEMD", str(tmp_path / "states"))
    return tmp_path / "states"


@pytest.mark.parametrize(
    ("do", "states", "asked"),
    [
        (lambda: running.restart_units(also_stopped=False), [], []),
        (
            lambda: running.restart_units(also_stopped=False),
            [f"{_TIMER}.loaded", f"{_ZYGOTE}.active"],
            [f"try-restart {_TIMER}", f"stop {_ZYGOTE}"],
        ),
        (
            lambda: running.restart_units(also_stopped=True),
            [f"{_TIMER}.loaded", f"{_ZYGOTE}.loaded", f"{_ZYGOTE}.active"],
            [f"restart {_TIMER}", f"restart {_ZYGOTE}"],
        ),
        (
            lambda: running.restart_units(also_stopped=True),
            [f"{_TIMER}.loaded", f"{_ZYGOTE}.loaded", f"{_NRI}.loaded", f"{_NRI}.active", f"{_MONITOR}.loaded"],
            [f"restart {_NRI}", f"restart {_TIMER}", f"restart {_ZYGOTE}"],
        ),
        (running.stop_units, [f"{_TIMER}.loaded", f"{_ZYGOTE}.active"], [f"stop {_ZYGOTE}"]),
    ],
    ids=[
        "undone, as they never were",
        "undone, as one had been started",
        "installed",
        "installed beside services",
        "removed by halves before",
    ],
)
def test_a_unit_without_a_file_is_no_failure(
    do: Callable[[], None], states: list[str], asked: list[str], systemd: Path
) -> None:
    for name in states:
        (systemd / name).touch()

    do()

    said = systemd / "asked"
    assert (said.read_text().splitlines() if said.exists() else []) == asked


def test_the_given_runtime_is_restarted(systemd: Path) -> None:
    (systemd / "crio.loaded").touch()

    runtime.read_again(runtime.CRIO)

    assert (systemd / "asked").read_text() == "restart crio\n"


def test_an_import_that_replaces_the_cri_table_is_named_as_the_cause(tmp_path: Path) -> None:
    config, imported = tmp_path / "config.toml", tmp_path / "conf.d" / "cri.toml"
    imported.parent.mkdir()
    config.write_text('version = 2\nimports = ["conf.d/*.toml"]\n')
    imported.write_text('[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "pause"\n')

    with pytest.raises(FailedPrecondition, match=f"it has no runtime pykata: '{config}' imports '{imported}'"):
        runtime.require_handlers({}, frozenset(), frozenset({"pykata"}), str(config))


def test_imports_that_are_no_list_are_no_cause_of_a_missing_handler(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("version = 2\nimports = 3\n")

    with pytest.raises(FailedPrecondition, match=r"it has no runtime pykata$"):
        runtime.require_handlers({}, frozenset(), frozenset({"pykata"}), str(config))


def test_a_second_installation_at_the_same_time_is_refused_and_another_prefix_is_not(tmp_path: Path) -> None:
    root = str(tmp_path)
    with running.lock(root, "/opt/pyshim"), running.lock(root, "/opt/other"):
        owner = f"change the installation in '/opt/pyshim': 'pyshim .*' as process {os.getpid()} does so"
        with pytest.raises(FailedPrecondition, match=owner), running.lock(root, "/opt/pyshim"):
            pass

    with running.lock(root, "/opt/pyshim"):
        pass
    assert list((tmp_path / "opt").iterdir()) == []


def test_a_second_installation_waits_if_it_is_told_to(tmp_path: Path) -> None:
    begun, order = threading.Event(), []

    def first() -> None:
        with running.lock(str(tmp_path), "/opt/pyshim"):
            begun.set()
            time.sleep(0.3)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(10)
    with running.lock(str(tmp_path), "/opt/pyshim", 60):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
