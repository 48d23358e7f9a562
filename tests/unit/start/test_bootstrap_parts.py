"""The parts of `start`: its words, what `-info` says, the socket of an address, and the daemon."""

import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from protos.containerd.types_pb2 import RuntimeInfo
from pyshim import __version__
from pyshim.start import address
from pyshim.start.address import abandon, claim, socket_path
from pyshim.start.daemonize import join_cgroup, spawn
from pyshim.start.dialect import runtime_info
from pyshim.start.invocation import CommandError, parse
from pyshim.task.sandbox_service import SANDBOX_SERVICE
from pyshim.task.service import SERVICES

START = "-namespace k8s.io -address /c.sock -publish-binary /usr/bin/containerd -id abc start"


@pytest.mark.parametrize(
    "line",
    [
        START,
        START.replace(" -", " --").replace("-namespace", "--namespace", 1),
        "-namespace=k8s.io --address=/c.sock -publish-binary=/usr/bin/containerd -id=abc start",
        START + " more words -that=mean nothing",
        "-from-the-future=yes " + START,
        "-from-the-future yes " + START,
        "-from-the-future " + START,
        START.replace("start", "-from-the-future start"),
    ],
    ids=["single dash", "double dash", "equals", "extra words", "unknown=", "unknown value", "unknown switch", "last"],
)
def test_spellings_of_one_call_mean_the_same(line: str) -> None:
    call = parse(line.split())

    assert (call.action, call.namespace, call.address, call.id) == ("start", "k8s.io", "/c.sock", "abc")
    assert call.publish_binary == "/usr/bin/containerd"
    assert (call.debug, call.info, call.version, call.bundle) == (False, False, False, "")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("-debug", "start"), {"debug": True, "action": "start"}),
        (("-debug=true", "start"), {"debug": True, "action": "start"}),
        (("-debug=0", "start"), {"debug": False, "action": "start"}),
        (("--debug=F", "start"), {"debug": False, "action": "start"}),
        (("-bundle", "/b/abc", "-debug", "delete"), {"action": "delete", "bundle": "/b/abc", "debug": True}),
        (("-v",), {"version": True}),
        (("-version",), {"version": True}),
        (("--version",), {"version": True}),
        (("-info",), {"info": True, "action": ""}),
        (("-id", "a", "--", "start", "-id", "b"), {"action": "start", "id": "a"}),
        (("-publish-binary", "", "-id", "a", "start"), {"publish_binary": "", "id": "a", "action": "start"}),
        (("-id", "-x", "start"), {"id": "-x", "action": "start"}),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_flag_takes_the_next_word_and_a_switch_a_value_only_with_an_equals_sign(
    words: tuple[str, ...], facts: dict[str, object]
) -> None:
    call = parse(list(words))

    assert {name: getattr(call, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-id"], "parse flag '-id': it needs a value"),
        (["-debug=maybe", "start"], "parse flag '-debug=maybe': 'maybe' is not a boolean"),
    ],
)
def test_unreadable_flag_is_named(words: list[str], text: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse(words)

    assert str(caught.value) == text


@pytest.mark.parametrize("words", [[], ["-"], ["--"], ["-="], ["---x"], ["=", "-"]])
def test_odd_words_do_not_crash(words: list[str]) -> None:
    parse(words)


def test_runtime_info_is_containerds_message() -> None:
    info = RuntimeInfo.FromString(runtime_info())

    assert info.name == "io.containerd.pykata.v2"
    assert info.version.version == __version__
    assert info.features.type_url == "types.containerd.io/opencontainers/runtime-spec/1/features/Features"
    assert not info.HasField("options")


def test_the_services_of_a_shims_socket_are_named() -> None:
    info = RuntimeInfo.FromString(runtime_info())

    assert info.annotations["io.containerd.pykata.v2/services"].split(",") == [*SERVICES, SANDBOX_SERVICE]


def test_mounts_of_layers_are_left_to_the_shim_but_not_the_making_of_file_systems() -> None:
    info = RuntimeInfo.FromString(runtime_info())

    assert info.annotations["containerd.io/runtime-allow-mounts"] == "mkdir/*,format/*,erofs"


def test_features_offer_recursive_read_only_mounts_and_nothing_that_is_not_there() -> None:
    features = json.loads(RuntimeInfo.FromString(runtime_info()).features.value)

    assert "rro" in features["mountOptions"]
    assert features["mountOptions"] == sorted(features["mountOptions"])
    assert "linux" not in features
    assert features["ociVersionMin"] <= features["ociVersionMax"]


def test_path_is_the_hash_of_the_cleaned_joined_parts() -> None:
    # printf /run/containerd/containerd.sock/k8s.io/abc | sha256sum
    digest = "a99a1752d3a0fadfb1f869026f16760475df03a572e20f4ccea9e6c1e5470b72"

    path = socket_path("/run/containerd/s", "/run/containerd//x/../containerd.sock", "k8s.io", "abc")

    assert path == socket_path("/run/containerd/s", "/run/containerd/containerd.sock", "k8s.io", "abc")
    assert path == f"/run/containerd/s/{digest}"


def test_longest_socket_directory_of_containerd_fits_and_a_longer_one_is_refused() -> None:
    assert socket_path("/" + "d" * 41, "/c", "n", "g")
    with pytest.raises(CommandError, match="longer than 107 bytes"):
        socket_path("/" + "d" * 42, "/c", "n", "g")


def test_claimed_socket_listens_before_another_can_claim_it(tmp_path: Path) -> None:
    path = "/proc/self/cwd/s/x" if len(str(tmp_path)) > 90 else f"{tmp_path}/s/x"
    listener = claim(path)
    assert listener is not None

    assert claim(path) is None

    abandon(listener, path)
    assert not os.path.exists(path)
    again = claim(path)
    assert again is not None
    abandon(again, path)


def test_file_that_is_no_socket_is_replaced_like_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("")

    listener = claim(str(path))

    assert listener is not None
    abandon(listener, str(path))


class _Deaf(socket.socket):
    def listen(self, backlog: int, /) -> None:
        raise OSError(errno.ENOBUFS, "no buffer space")


def _no_socket() -> socket.socket:
    raise OSError(errno.EMFILE, "too many open files")


@pytest.mark.parametrize("new_socket", [_no_socket, lambda: _Deaf(socket.AF_UNIX, socket.SOCK_STREAM)])
def test_a_claim_that_fails_leaves_neither_socket_nor_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_socket: Callable[[], socket.socket]
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setattr(address, "_new_socket", new_socket)

    with pytest.raises(CommandError, match="bind socket"):
        claim(f"{tmp_path}/x", str(notes))

    assert [path.name for path in tmp_path.rglob("*")] == ["notes"]


def test_a_claim_that_fails_leaves_the_note_of_another_shims_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, notes = f"{tmp_path}/x", str(tmp_path / "notes")
    other = claim(path, notes)
    assert other is not None
    monkeypatch.setattr(address, "_new_socket", _no_socket)

    with pytest.raises(CommandError, match="bind socket"):
        claim(path, notes)

    assert sorted(each.name for each in tmp_path.rglob("*")) == ["notes", "x", "x"]
    abandon(other, path, notes)


def test_directory_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()

    with pytest.raises(CommandError, match=r"^bind socket '.*/x': EISDIR"):
        claim(str(tmp_path / "x"))


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def spawn_failing(tmp_path: Path, command: list[str], cgroup: str = "") -> str:
    before, fds = children(), len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(CommandError) as caught:
        spawn(
            command, environment={}, listening_fd=listener.fileno(), log_path=str(tmp_path / "log"), shim_cgroup=cgroup
        )
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == fds
    return str(caught.value)


def test_program_that_cannot_be_executed_is_reported_and_reaped(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")

    assert (
        spawn_failing(tmp_path, [missing, "serve"]) == f"execute daemon {missing!r}: ENOENT (no such file or directory)"
    )


def test_shim_cgroup_that_does_not_exist_is_reported_and_the_child_reaped(tmp_path: Path) -> None:
    text = spawn_failing(tmp_path, ["/bin/true"], cgroup="/no/such/cgroup")

    assert text == "join cgroup '/no/such/cgroup': no such cgroup below '/sys/fs/cgroup'"


def test_unified_hierarchy_is_joined_once(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "shims").mkdir()
    (tmp_path / "shims" / "cgroup.procs").write_text("")

    join_cgroup("/shims", str(tmp_path))

    assert (tmp_path / "shims" / "cgroup.procs").read_text() == "0"


def test_every_v1_hierarchy_that_has_the_cgroup_is_joined(tmp_path: Path) -> None:
    for controller in ("cpu", "memory", "pids"):
        (tmp_path / controller / "shims").mkdir(parents=True)
    for controller in ("cpu", "memory"):
        (tmp_path / controller / "shims" / "cgroup.procs").write_text("")

    join_cgroup("shims", str(tmp_path))

    assert [(tmp_path / name / "shims" / "cgroup.procs").read_text() for name in ("cpu", "memory")] == ["0", "0"]
    assert not (tmp_path / "pids" / "shims" / "cgroup.procs").exists()
