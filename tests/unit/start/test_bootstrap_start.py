"""`start` as containerd sees it: real processes, real sockets, a daemon that reports its arguments."""

import fcntl
import os
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from start_bench import StartBench, is_alive

from protos.containerd import runtimeoptions_pb2
from protos.containerd.bootstrap_pb2 import BootstrapParams, BootstrapResult, LogLevel

SANDBOX_ID = "io.kubernetes.cri.sandbox-id"


def in_pod(sandbox_id: str) -> dict[str, str]:
    """Annotations of a pod's container, as containerd's CRI plugin writes them."""
    return {"io.kubernetes.cri.container-type": "container", SANDBOX_ID: sandbox_id}


def socket_file(bench: StartBench) -> Path:
    (path,) = bench.sockets.iterdir()
    return path


def test_legacy_answer_is_the_bare_address_and_nothing_else(bench: StartBench) -> None:
    bundle = bench.bundle("c1")

    result = bench.start(bundle)

    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == f"unix://{socket_file(bench)}".encode()
    assert (bundle / "address").read_bytes() == result.stdout
    (note,) = Path(f"{bench.sockets}.z", "sockets").iterdir()
    assert note.readlink() == socket_file(bench)
    assert not [path for path in bundle.iterdir() if path.name.startswith(".")]


def test_socket_and_its_directory_are_private(bench: StartBench) -> None:
    bench.start(bench.bundle("c1"))

    assert stat.S_IMODE(bench.sockets.stat().st_mode) == 0o700
    assert stat.S_IMODE(socket_file(bench).stat().st_mode) == 0o600


def test_daemon_gets_its_table_of_fds_its_session_and_its_arguments(bench: StartBench) -> None:
    bundle = bench.bundle("c1", in_pod("pod1"))
    score = int(Path("/proc/self/oom_score_adj").read_text())

    result = bench.start(bundle, "-debug")

    report = bench.ask(result.stdout.decode())
    assert report["argv"] == [
        *("-namespace", "k8s.io", "-id", "pod1", "-address", bench.containerd),
        *("-ttrpc-address", f"{bench.containerd}.ttrpc", "-publish-binary", "/usr/bin/containerd"),
        *("-bundle", str(bundle), "-debug", "serve"),
    ]
    fds = {int(fd): target for fd, target in report["fds"].items()}
    assert [fds[0], fds[1], fds[2]] == ["/dev/null", "/dev/null", str(bundle / "log")]
    assert fds[3].startswith("socket:")
    assert set(fds) == {0, 1, 2, 3}
    assert report["session"] == report["pid"]
    assert report["cwd"] == str(bundle)
    assert report["oom_score_adj"] == min(score + 1, 1000)
    assert report["no_site"]
    assert not report["log_blocks"]


def test_a_caller_without_addresses_is_served(bench: StartBench) -> None:
    """CRI-O has neither a containerd's address nor one for events; it reads stdout and stderr as one text."""
    words = bench.words("c1")
    words[words.index("-address") + 1] = ""

    process = bench.popen(bench.bundle("c1"), words, env={"TTRPC_ADDRESS": ""}, stderr=subprocess.STDOUT)
    answer, _ = process.communicate(timeout=30)

    argv = bench.ask(answer.decode())["argv"]
    assert (argv[argv.index("-address") + 1], argv[argv.index("-ttrpc-address") + 1]) == ("", "")


def test_a_caller_without_addresses_has_to_give_a_spec_and_its_directory_stays_as_it_is(bench: StartBench) -> None:
    """CRI-O executes its default runtime in its own directory for an infra container that it has dropped."""
    bundle = bench.bundle("c1")
    (bundle / "config.json").unlink()
    words = bench.words("c1")
    words[words.index("-address") + 1] = ""

    process = bench.popen(bundle, words, env={"TTRPC_ADDRESS": ""})
    answer, error = process.communicate(timeout=30)

    assert (process.returncode, answer) == (1, b"")
    assert error == f"read spec '{bundle}/config.json': ENOENT (no such file or directory)\n".encode()
    assert [path.name for path in bundle.iterdir()] == ["log"]
    assert bench.daemons() == []


def test_daemon_inherits_no_fd_of_its_maker(bench: StartBench) -> None:
    bundle = bench.bundle("c1")
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)

    result = bench.start(bundle, pass_fds=(write_end,))
    os.close(write_end)

    assert bench.ask(result.stdout.decode())["pid"] in bench.daemons()
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_start_works_without_stdin_and_stderr(bench: StartBench) -> None:
    bundle = bench.bundle("c1")

    process = bench.popen(bundle, bench.words("c1"), shell="exec 0<&- 2>&-")
    out, _ = process.communicate(timeout=30)

    assert process.returncode == 0
    assert set(bench.ask(out.decode())["fds"]) == {"0", "1", "2", "3"}


def test_log_of_the_daemon_arrives_in_the_fifo(bench: StartBench) -> None:
    bundle = bench.bundle("c1")
    log_fd = os.open(bundle / "log", os.O_RDWR)

    result = bench.start(bundle)

    bench.ask(result.stdout.decode())
    assert os.read(log_fd, 100) == b"daemon speaks\n"
    os.close(log_fd)


def test_start_without_a_log_fifo_still_starts(bench: StartBench) -> None:
    bundle = bench.bundle("c1")
    (bundle / "log").unlink()

    result = bench.start(bundle)

    assert bench.ask(result.stdout.decode())["fds"]["2"] == "/dev/null"


def test_containers_of_one_pod_share_the_daemon(bench: StartBench) -> None:
    sandbox, app = (
        bench.bundle("pod1", {"io.kubernetes.cri.container-type": "sandbox", SANDBOX_ID: "pod1"}),
        bench.bundle("app1", in_pod("pod1")),
    )

    first, second = bench.start(sandbox), bench.start(app)

    assert (second.returncode, second.stderr) == (0, b"")
    assert first.stdout == second.stdout
    assert (app / "address").read_bytes() == first.stdout
    bench.ask(first.stdout.decode())
    assert len(bench.daemons()) == 1


def test_namespaces_do_not_share_a_daemon(bench: StartBench) -> None:
    first = bench.start(bench.bundle("c1"))
    bench.namespace = "other"

    second = bench.start(bench.root / "c1")

    assert first.stdout != second.stdout


@pytest.mark.parametrize("stale", [False, True], ids=["free name", "stale socket"])
def test_simultaneous_starts_of_one_group_make_one_daemon(bench: StartBench, stale: bool) -> None:
    bundles = [bench.bundle(f"c{n}", in_pod("pod1")) for n in range(8)]
    if stale:
        leave_stale_socket(bench, bundles[0])

    processes = [bench.popen(bundle, bench.words(bundle.name)) for bundle in bundles]
    results = [(*process.communicate(timeout=60), process.returncode) for process in processes]

    assert {result[1:] for result in results} == {(b"", 0)}
    assert len({result[0] for result in results}) == 1
    pid = bench.ask(results[0][0].decode())["pid"]  # first: `start` is done before its daemon has begun
    assert bench.alive() == [pid]


def waits_for_a_lock(pid: int) -> bool:
    return any("->" in line and str(pid) in line.split() for line in Path("/proc/locks").read_text().splitlines())


def test_socket_that_another_start_has_bound_but_does_not_serve_yet_is_waited_for(bench: StartBench) -> None:
    """To a connect it looks like that of a dead daemon."""
    bundle = bench.bundle("c1")
    path = leave_stale_socket(bench, bundle)
    path.unlink()
    directory = os.open(bench.sockets, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        inode = path.stat().st_ino
        process = bench.popen(bundle, bench.words("c1"))
        while process.poll() is None and not waits_for_a_lock(process.pid):
            os.sched_yield()

        other.listen()
        os.close(directory)
        out, _ = process.communicate(timeout=30)

    assert (process.returncode, out) == (0, f"unix://{path}".encode())
    assert path.stat().st_ino == inode


def leave_stale_socket(bench: StartBench, bundle: Path) -> Path:
    """The socket of a daemon that was killed."""
    address = bench.start(bundle).stdout.decode()
    pid = bench.ask(address)["pid"]
    os.kill(pid, 9)
    while is_alive(pid):
        os.sched_yield()
    return Path(address.removeprefix("unix://"))


def test_daemon_whose_backlog_is_full_counts_as_alive(bench: StartBench) -> None:
    bundle = bench.bundle("c1")
    path = leave_stale_socket(bench, bundle)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))

        result = bench.start(bundle)

    assert (result.returncode, result.stdout) == (0, f"unix://{path}".encode())
    assert len(bench.daemons()) == 1


def params(bench: StartBench, container_id: str, **fields: object) -> bytes:
    return BootstrapParams(
        instance_id=container_id,
        namespace=bench.namespace,
        containerd_ttrpc_address="/run/other.ttrpc",
        containerd_grpc_address=bench.containerd,
        **fields,  # type: ignore[arg-type]
    ).SerializeToString()


def test_bootstrap_caller_gets_a_bootstrap_result(bench: StartBench) -> None:
    bundle = bench.bundle("c1")

    result = bench.start(bundle, stdin=params(bench, "c1", log_level=LogLevel.LOG_LEVEL_DEBUG))

    assert (result.returncode, result.stderr) == (0, b"")
    answer = BootstrapResult.FromString(result.stdout)
    assert (answer.version, answer.protocol) == (3, "ttrpc")
    argv = bench.ask(answer.address)["argv"]
    assert argv[argv.index("-ttrpc-address") + 1] == "/run/other.ttrpc"
    assert "-debug" in argv
    assert (bundle / "address").read_text() == answer.address


def test_bootstrap_caller_chooses_the_socket_directory(bench: StartBench) -> None:
    wanted = bench.root / "elsewhere"

    result = bench.start(bench.bundle("c1"), stdin=params(bench, "c1", socket_dir=str(wanted)))

    assert BootstrapResult.FromString(result.stdout).address.startswith(f"unix://{wanted}/")
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o700


@pytest.mark.parametrize("spec", [b"{", b"", b'{"a": 1} trailing', b"\xff\xfe", b'{"annotations": {"a": NaNa}}'])
def test_spec_that_is_not_json_fails_with_one_line_and_leaves_nothing(bench: StartBench, spec: bytes) -> None:
    bundle = bench.bundle("c1")
    (bundle / "config.json").write_bytes(spec)

    result = bench.start(bundle)

    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.startswith(f"parse spec '{bundle}/config.json': ".encode())
    assert result.stderr.count(b"\n") == 1
    assert bench.nothing_left()
    assert not (bundle / "address").exists()


def test_group_that_is_no_identifier_is_refused(bench: StartBench) -> None:
    result = bench.start(bench.bundle("c1", in_pod("../../etc")))

    assert result.returncode == 1
    assert result.stderr == f"check annotation {SANDBOX_ID} '../../etc': not a valid identifier\n".encode()
    assert bench.nothing_left()


def test_answer_without_a_reader_ends_the_daemon_and_leaves_nothing(bench: StartBench) -> None:
    bundle = bench.bundle("c1")
    read_end, write_end = os.pipe()
    os.close(read_end)

    process = bench.popen(bundle, bench.words("c1"), stdout=write_end)
    os.close(write_end)
    _, err = process.communicate(timeout=30)

    assert process.returncode == 1
    assert err == b"write answer 'stdout': EPIPE (broken pipe)\n"
    assert bench.nothing_left()
    assert not (bundle / "address").exists()


def test_bundle_that_takes_no_address_file_ends_the_daemon_and_leaves_nothing(bench: StartBench) -> None:
    bundle = bench.bundle("c1")
    (bundle / "address").mkdir()

    result = bench.start(bundle)

    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr == f"write '{bundle}/address': EISDIR (is a directory)\n".encode()
    assert bench.nothing_left()
    assert {path.name for path in bundle.iterdir()} == {"address", "config.json", "log"}


def test_socket_directory_that_is_a_file_is_named(bench: StartBench) -> None:
    bench.sockets.write_text("")

    result = bench.start(bench.bundle("c1"))

    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr == f"open socket directory '{bench.sockets}': ENOTDIR (not a directory)\n".encode()


@pytest.mark.parametrize("flag", ["-namespace", "-id"])
def test_missing_flag_is_named(bench: StartBench, flag: str) -> None:
    words = bench.words("c1")
    del words[words.index(flag) : words.index(flag) + 2]

    process = bench.popen(bench.bundle("c1"), words)
    out, err = process.communicate(timeout=30)

    assert (process.returncode, out) == (1, b"")
    assert err == f"check flag '{flag}': it is required by 'start'\n".encode()


def test_options_without_end_are_refused(bench: StartBench) -> None:
    result = bench.start(bench.bundle("c1"), stdin=b"\0" * (17 << 20))

    assert result.returncode == 1
    assert result.stderr.startswith(b"read runtime options 'stdin': more than ")


@pytest.mark.parametrize("has_spec", [False, True], ids=["without a spec", "with a spec"])
@pytest.mark.parametrize(
    ("options", "config"),
    [
        pytest.param({"config_path": "/etc/tdx.toml"}, "/etc/tdx.toml", id="file"),
        pytest.param({"config_body": b"[runtime]"}, "configuration.toml", id="body"),
        pytest.param({}, "", id="none"),
    ],
)
def test_a_sandbox_has_the_configuration_of_its_runtime_handler(
    bench: StartBench, options: dict[str, Any], config: str, has_spec: bool
) -> None:
    """Without a spec, no later call of containerd's Sandbox API brings it. With one, a text comes with Create."""
    bundle = bench.bundle("c1")
    if not has_spec:
        (bundle / "config.json").unlink()
    elif "config_body" in options:
        config = ""
    message = AnyMessage(
        type_url="runtimeoptions.v1.Options", value=runtimeoptions_pb2.Options(**options).SerializeToString()
    )

    result = bench.start(bundle, stdin=message.SerializeToString())

    assert (result.returncode, result.stderr) == (0, b"")
    words = bench.ask(result.stdout.decode())["argv"]
    given = [words[number + 1] for number, word in enumerate(words) if word == "-config"]
    assert [path.removeprefix(f"{bundle}/") for path in given] == ([config] if config else [])
    written = bundle / "configuration.toml"
    assert (written.read_bytes() if written.exists() else None) == (options.get("config_body") if config else None)


def test_core_scheduling_is_enabled_or_refused_by_name(bench: StartBench) -> None:
    """Which of the two is the kernel's decision (CONFIG_SCHED_CORE, hyperthreads); a quiet third way there is not."""
    result = bench.start(bench.bundle("c1"), env={"SCHED_CORE": "1"})

    if result.returncode == 0:
        assert result.stderr == b""
        assert bench.ask(result.stdout.decode())["environment"]["SCHED_CORE"] == "1"
    else:
        assert result.stderr.startswith(b"enable core scheduling of process '")
        assert bench.nothing_left()
