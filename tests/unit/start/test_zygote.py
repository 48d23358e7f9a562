"""The zygote: what it forks is what an exec would have made; where it cannot fork, the exec says why."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from start_bench import REPOSITORY, StartBench, children_of, is_alive, is_forked, report

from pyshim.node.install.launcher import import_paths
from pyshim.start import zygote_client
from pyshim.start.zygote_client import address

NOT_COMPARED = {"pid", "session", "parent", "random", "frozen", "fds", "heap", "reason", "prepared"}


def expected_of_a_heap() -> list[str]:
    """In /proc/PID/smaps of a fork: equal pages may be merged, where the kernel can."""
    return ["mg"] if Path("/sys/kernel/mm/ksm").exists() else []


def made_at(address: Path) -> None:
    """`address` exists: the zygote listens there."""
    deadline = time.monotonic() + 60
    while not address.exists():
        assert time.monotonic() < deadline, f"no zygote at {address}"
        time.sleep(0.005)


def test_the_daemon_is_forked_where_a_zygote_is_and_executed_where_none_is(bare_bench: StartBench) -> None:
    executed = report(bare_bench, "c1")
    bare_bench.with_zygote()

    assert (executed["frozen"], executed["reason"]) == (0, "PYSHIM_ZYGOTE is off")
    forked = report(bare_bench, "c2")
    assert (forked["parent"], forked["reason"]) == (bare_bench.zygote.pid, "")  # type: ignore[union-attr]


def test_a_forked_daemon_is_what_an_executed_one_is(bare_bench: StartBench) -> None:
    """The caller's limits, umask, niceness, OOM score and environment are not those of the zygote."""
    shell = "ulimit -n 777; ulimit -c 0; umask 027; echo 1000 > /proc/self/oom_score_adj; renice -n 19 $$ >/dev/null"
    # A shell that runs the tests in the background may ignore them.
    wrapper = ["env", "--default-signal=HUP,INT,QUIT"]
    options: dict[str, Any] = {"shell": shell, "env": {"LC_ODD": "a=b\nc"}, "wrapper": wrapper}
    executed = report(bare_bench, "c1", **options)
    bare_bench.with_zygote()
    bare_bench.sockets.joinpath(executed_socket(bare_bench)).unlink()

    forked = bare_bench.ask(bare_bench.start(bare_bench.root / "c1", **options).stdout.decode())

    assert forked["parent"] == bare_bench.zygote.pid  # type: ignore[union-attr]
    assert (executed["oom_score_adj"], executed["nice"], executed["umask"]) == (1000, 19, "Umask:\t0027")
    for found in (executed, forked):
        found["environment"] = {k: v for k, v in found["environment"].items() if not k.startswith("PYSHIM_ZYGOTE")}
    assert {k: v for k, v in forked.items() if k not in NOT_COMPARED} == {
        k: v for k, v in executed.items() if k not in NOT_COMPARED
    }
    assert forked["session"] == forked["pid"]
    assert {fd: kind(target) for fd, target in forked["fds"].items()} == {
        fd: kind(target) for fd, target in executed["fds"].items()
    }
    assert forked["collects"]
    assert forked["frozen"]
    assert (executed["heap"], forked["heap"]) == ([], expected_of_a_heap())


def executed_socket(bench: StartBench) -> str:
    (path,) = bench.sockets.iterdir()
    return path.name


def kind(target: str) -> str:
    return target.partition(":")[0]


def test_a_fork_has_what_was_prepared_for_it_and_for_those_before(bare_bench: StartBench) -> None:
    bare_bench.with_zygote()

    assert [report(bare_bench, name)["prepared"] for name in ("c1", "c2")] == [1, 2]


def test_two_forks_do_not_share_their_random_numbers(bare_bench: StartBench) -> None:
    bare_bench.with_zygote(modules="random")

    first, second = report(bare_bench, "c1"), report(bare_bench, "c2")

    assert first["random"] != second["random"]


def test_the_zygote_has_one_thread_and_no_event_loop_when_it_forks(bare_bench: StartBench) -> None:
    packages = [path for path in sys.path if path.endswith("-packages")]
    script = (
        "import sys, os, importlib; sys.path += sys.argv[1:]\n"
        "from pyshim.zygote.server import SHIM_MODULES\n"
        "for name in SHIM_MODULES: importlib.import_module(name)\n"
        "import asyncio\n"
        "print(len(os.listdir('/proc/self/task')), asyncio._get_running_loop())\n"
        "fds = [int(fd) for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "print(*sorted(fd for fd in fds if 'libffi' not in os.readlink(f'/proc/self/fd/{fd}')))"
    )
    command = [sys.executable, "-I", "-S", "-c", script, str(REPOSITORY), *packages]

    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    # libffi, which ctypes loads, holds its own file open from version 3.5 on.
    assert out.splitlines() == ["1 None", "0 1 2"]


@pytest.mark.root
def test_a_caller_in_another_namespace_is_refused_and_executes(bare_bench: StartBench) -> None:
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, timeout=30).returncode != 0:
        pytest.skip("a namespace cannot be made here")
    zygote = bare_bench.with_zygote()
    bundle = bare_bench.bundle("c1")
    driver = bare_bench.popen(bundle, bare_bench.words("c1"), stdin=subprocess.DEVNULL, wrapper=["unshare", "--uts"])

    out, err = driver.communicate(timeout=30)

    assert (driver.returncode, err) == (0, b"")
    found = bare_bench.ask(out.decode())
    assert found["frozen"] == 0
    assert found["reason"] == f"the zygote refuses: process {driver.pid} has another uts namespace"
    assert "another uts namespace" in zygote.said


@pytest.mark.root
def test_a_caller_of_another_user_is_refused(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    os.chmod(bare_bench.zygote_dir, 0o711)
    (path,) = (p for p in bare_bench.zygote_dir.iterdir() if p.is_socket())
    os.chmod(path, 0o666)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(bare_bench.zygote_dir)  # the way there need not be open to others
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(30)
                sock.connect(path.name)
                os.write(write_end, sock.recv(1000))
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    answer = os.read(read_end, 1000)
    os.close(read_end)

    assert answer.startswith(b"no: ")
    assert b"is of user 65534" in answer, zygote.said


@pytest.mark.parametrize(
    "request_bytes",
    [b"\0", b"hello", b"9\0" + b"9\0\0" + b"\0", b"1\0" + b"0\0\0\0" + b"/usr/bin/other", b"\xff" * 100_000],
    ids=["empty strings", "no counts", "counts that lie", "another interpreter", "large"],
)
def test_a_request_that_is_none_is_refused_and_the_zygote_goes_on(bare_bench: StartBench, request_bytes: bytes) -> None:
    zygote = bare_bench.with_zygote()
    (path,) = (p for p in bare_bench.zygote_dir.iterdir() if p.is_socket())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(30)
        sock.connect(str(path))
        sock.send(request_bytes)

        assert sock.recv(1000).startswith(b"no: ")

    assert is_forked(bare_bench, "c1"), zygote.said


def touch(tree: Path) -> None:
    (tree / "pyshim" / "zygote" / "server.py").touch()


def write_in_place(tree: Path) -> None:
    with (tree / "pyshim" / "start" / "zygote.py").open("a") as file:
        file.write("\n")


def replace_a_file(tree: Path) -> None:
    new = tree / "new"
    shutil.copyfile(tree / "pyshim" / "__init__.py", new)
    new.rename(tree / "pyshim" / "__init__.py")


def replace_the_tree(tree: Path) -> None:
    old = tree.rename(tree.with_name("old"))
    shutil.copytree(old, tree)


@pytest.mark.parametrize("change", [touch, write_in_place, replace_a_file, replace_the_tree])
def test_a_zygote_whose_code_has_changed_ends_and_what_it_forked_stays(
    bare_bench: StartBench, change: Callable[[Path], None]
) -> None:
    tree = bare_bench.root / "tree"
    shutil.copytree(REPOSITORY / "pyshim", tree / "pyshim", ignore=shutil.ignore_patterns("__pycache__"))
    time.sleep(0.2)  # files that changed just before a zygote began count as changed while it was importing
    zygote = bare_bench.with_zygote(repository=tree)
    bare_bench.repository = tree
    first = report(bare_bench, "c1")
    change(tree)

    second = report(bare_bench, "c2")

    assert (first["parent"], second["frozen"]) == (zygote.pid, 0)
    assert second["reason"] == "the zygote refuses: the code on disk has changed"
    assert zygote.process.wait(30) == 0
    assert "the code on disk has changed" in zygote.said
    assert sorted(bare_bench.alive()) == sorted([first["pid"], second["pid"]])
    assert not [p for p in bare_bench.zygote_dir.iterdir() if p.is_socket()]


def test_code_that_changed_while_it_was_imported_is_not_served(bare_bench: StartBench) -> None:
    tree = bare_bench.root / "tree"
    shutil.copytree(REPOSITORY / "pyshim", tree / "pyshim", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tree / "pyshim" / "zygote" / "fork.py"
    changed.write_text(changed.read_text() + "\nos.utime(__file__)\n")
    time.sleep(0.2)  # as above
    driver = Path(__file__).parent / "zygote_driver.py"
    command = [sys.executable, "-I", "-S", driver, tree, bare_bench.zygote_dir, "0", ""]

    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    assert done.stderr.endswith(f"use the loaded code: {str(changed)!r} changed while it was being loaded\n")


def test_a_zygote_whose_code_others_can_change_says_so(bare_bench: StartBench) -> None:
    tree = bare_bench.root / "tree"
    shutil.copytree(REPOSITORY / "pyshim", tree / "pyshim", ignore=shutil.ignore_patterns("__pycache__"))
    tree.chmod(0o777)
    time.sleep(0.2)  # as above

    zygote = bare_bench.with_zygote(repository=tree)

    assert f"users other than root can change the code of shims: '{tree}' by everyone" in zygote.said


@pytest.mark.parametrize(
    ("text", "expected"), [("2.5", 2.5), ("", 2.0), ("soon", 2.0), ("0", 2.0), ("-1", 2.0), ("nan", 2.0)]
)
def test_the_limit_can_be_another(text: str, expected: float) -> None:
    assert zygote_client._patience_s({"PYSHIM_ZYGOTE_WITHIN_S": text}) == expected


def test_another_version_has_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    before = zygote_client.address("/run/x")
    monkeypatch.setattr("pyshim.__version__", "999")

    assert zygote_client.address("/run/x") != before


def test_a_zygote_without_requests_ends(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote(idle_s=0.05)

    assert zygote.process.wait(30) == 0
    assert not [p for p in bare_bench.zygote_dir.iterdir() if p.is_socket()]


def test_a_second_zygote_that_a_start_has_launched_ends_at_once(bare_bench: StartBench) -> None:
    first = bare_bench.with_zygote(idle_s=600)
    second = subprocess.run(first.process.args, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    assert (second.returncode, second.stderr) == (0, "zygote: another zygote serves here already\n")
    assert is_forked(bare_bench, "c1")


def test_a_second_zygote_that_stays_takes_over_when_the_first_one_ends(bare_bench: StartBench) -> None:
    """As the unit's does after a `start` was there first."""
    first = bare_bench.with_zygote(idle_s=600)
    second = subprocess.Popen(
        [*first.process.args[:-2], "0", ""],  # type: ignore[index]
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert second.stderr is not None
        assert second.stderr.readline() == "zygote: another zygote serves here already\n"

        first.close()

        assert second.stderr.readline() == "zygote: ready\n"
        assert report(bare_bench, "c1")["parent"] == second.pid
    finally:
        second.terminate()
        second.communicate(timeout=30)


def test_the_socket_of_a_dead_zygote_is_no_obstacle(bare_bench: StartBench) -> None:
    dead = bare_bench.with_zygote()
    dead.process.kill()
    dead.process.wait(30)

    assert "no zygote listens at" in report(bare_bench, "c1", daemon=noting_daemon(bare_bench))["reason"]
    bare_bench.with_zygote()
    assert is_forked(bare_bench, "c2")


@pytest.mark.parametrize("choice", [{}, {"PYSHIM_ZYGOTE": "auto"}], ids=["unset", "auto"])
def test_the_first_start_leaves_a_zygote_behind(bare_bench: StartBench, choice: dict[str, str]) -> None:
    bundle = bare_bench.bundle("c1")
    daemon = noting_daemon(bare_bench)
    process = bare_bench.popen(bundle, bare_bench.words("c1"), daemon=daemon, without=("PYSHIM_ZYGOTE",), env=choice)

    out, err = process.communicate(timeout=30)

    found = bare_bench.ask(out.decode())
    made_at(bare_bench.root / "noted")
    assert (process.returncode, err, found["frozen"]) == (0, b"", 0)
    assert found["reason"] == f"no zygote listens at {zygote_client.address(str(bare_bench.zygote_dir))!r}"
    noted = (bare_bench.root / "noted").read_text()
    assert noted == f"-idle 600 -directory {bare_bench.zygote_dir} zygote /dev/null"


def noting_daemon(bench: StartBench) -> Path:
    """A launcher that notes the words and the standard output of a zygote that it is asked for."""
    daemon, noted = bench.root / "daemon.py", bench.root / "noted"
    daemon.write_text(
        "import os, sys, runpy\n"
        "if sys.argv[-1] == 'zygote':\n"
        f"    open({str(noted)!r} + '.new', 'w').write(' '.join(sys.argv[1:]) + ' ' + os.readlink('/proc/self/fd/1'))\n"
        f"    os.rename({str(noted)!r} + '.new', {str(noted)!r})\n"
        "else:\n"
        f"    runpy.run_path({str(Path(__file__).parent / 'fake_daemon.py')!r}, run_name='__main__')\n"
    )
    return daemon


def test_a_zygote_that_is_on_its_way_up_is_not_made_twice(bare_bench: StartBench) -> None:
    bare_bench.zygote_dir.mkdir()
    lock = os.open(f"{zygote_client.address(str(bare_bench.zygote_dir))}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before = children_of(os.getpid())

    zygote_client.launch(["/no/such/program"], {}, str(bare_bench.zygote_dir))

    os.close(lock)
    assert children_of(os.getpid()) == before


@pytest.mark.parametrize("choice", ["off", "core"])
def test_the_zygote_is_not_used_where_that_is_not_wanted(bare_bench: StartBench, choice: str) -> None:
    zygote = bare_bench.with_zygote()
    environment = {"PYSHIM_ZYGOTE": "off"} if choice == "off" else {"SCHED_CORE": "1"}
    reason = "PYSHIM_ZYGOTE is off" if choice == "off" else "SCHED_CORE is set"

    result = bare_bench.start(bare_bench.bundle("c1"), env=environment)

    if choice == "off" or result.returncode == 0:  # core scheduling needs a kernel that has it
        assert bare_bench.ask(result.stdout.decode())["reason"] == reason
    assert "refused" not in zygote.said


def test_many_starts_at_once_are_all_answered(bare_bench: StartBench) -> None:
    bare_bench.with_zygote()
    bundles = [bare_bench.bundle(f"c{n}") for n in range(8)]

    processes = [bare_bench.popen(bundle, bare_bench.words(bundle.name)) for bundle in bundles]
    results = [(*process.communicate(timeout=60), process.returncode) for process in processes]

    assert {result[1:] for result in results} == {(b"", 0)}
    assert len({bare_bench.ask(result[0].decode())["pid"] for result in results}) == 8


@pytest.mark.root
def test_a_forked_daemon_joins_the_control_groups_of_its_caller(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    with own_cgroup() as (name, procs):
        shell = "; ".join(f"echo $$ > {path}" for path in procs)

        found = report(bare_bench, "c1", shell=shell)

        assert found["parent"] == zygote.pid
        assert found["cgroups"].count(f"/{name}\n") == len(procs)
        assert name not in Path(f"/proc/{zygote.pid}/cgroup").read_text()
        assert is_forked(bare_bench, "c2")
        bare_bench.close()


@contextmanager
def own_cgroup() -> Iterator[tuple[str, list[str]]]:
    """A new cgroup below this process's own in every hierarchy where that can be made, as name and `cgroup.procs`."""
    name = f"zygote-test-{os.getpid()}"
    ours = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    made = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        fs_type, _, options = right.split()
        if fs_type not in ("cgroup", "cgroup2"):
            continue
        key = next((k for k in ours if k and set(k.split(",")) <= set(options.split(","))), "")
        if "cpuset" in key:
            continue  # a new one takes no process before it has been given cpus
        root, mount_point = left.split()[3:5]
        path = Path(f"{mount_point}/{ours[key].removeprefix(root.rstrip('/'))}/{name}")
        try:
            path.mkdir()
        except OSError:
            continue
        made.append(path)
    if not made:
        pytest.skip("no control group can be made here")
    try:
        yield name, [str(path / "cgroup.procs") for path in made]
    finally:
        deadline = time.monotonic() + 20
        while made:
            try:
                made[-1].rmdir()
                made.pop()
            except OSError:
                assert time.monotonic() < deadline, f"still in use: {made}"
                time.sleep(0.01)


def test_a_zygote_that_does_not_answer_is_given_up_and_its_child_never_serves(bare_bench: StartBench) -> None:
    """When it goes on, it takes the request, its child finds the caller gone, and ends."""
    zygote = bare_bench.with_zygote()
    os.kill(zygote.pid, signal.SIGSTOP)

    found = report(bare_bench, "c1", env={"PYSHIM_ZYGOTE_WITHIN_S": "0.1"})
    os.kill(zygote.pid, signal.SIGCONT)

    assert (found["frozen"], found["reason"]) == (0, "the zygote did not answer within 0.1 s")
    assert is_forked(bare_bench, "c2"), zygote.said
    assert len(bare_bench.alive()) == 2


def test_a_child_goes_on_when_the_zygote_is_killed(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    forked = report(bare_bench, "c1")

    zygote.process.kill()
    zygote.process.wait(30)

    assert bare_bench.alive() == [forked["pid"]]


def test_a_daemon_that_is_not_released_ends(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bare_bench.root / "l"))
        forked = fork_by_hand(bare_bench, listener.fileno())
        (child,) = children_of(zygote.pid)

        forked.end()

        ended(child)
    assert not bare_bench.daemons()


def test_many_callers_that_ask_nothing_do_not_delay_one_that_asks(bare_bench: StartBench) -> None:
    """Each may be silent for a second; one after the other they would take minutes."""
    zygote = bare_bench.with_zygote()
    with contextlib.ExitStack() as silent:
        for _ in range(200):
            caller = silent.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            caller.connect(zygote_client.address(str(bare_bench.zygote_dir)))

        assert is_forked(bare_bench, "c1"), zygote.said

        caller.settimeout(30)
        assert caller.recv(zygote_client.MAX_REPLY_BYTES) == b"no: the request did not come within 1 s"


def test_a_caller_that_hangs_up_without_a_request_costs_no_child(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(zygote_client.address(str(bare_bench.zygote_dir)))

    assert is_forked(bare_bench, "c1"), zygote.said
    assert len(children_of(zygote.pid)) == 1


def test_the_zygote_keeps_no_descriptor_of_its_callers(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    before = len(os.listdir(f"/proc/{zygote.pid}/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, open(os.devnull) as file:
        sock.connect(zygote_client.address(str(bare_bench.zygote_dir)))
        socket.send_fds(sock, [b"no request"], [file.fileno()] * 2)
        assert sock.recv(zygote_client.MAX_REPLY_BYTES).startswith(zygote_client.NO)

    assert is_forked(bare_bench, "c1"), zygote.said
    assert is_forked(bare_bench, "c2"), zygote.said
    # The last caller may have its answer before the zygote goes on.
    deadline = time.monotonic() + 30
    while len(os.listdir(f"/proc/{zygote.pid}/fd")) != before:
        assert time.monotonic() < deadline, os.listdir(f"/proc/{zygote.pid}/fd")
        time.sleep(0.005)


def test_a_container_of_a_pod_that_has_its_shim_costs_no_fork(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    shim = report(bare_bench, "p1")
    os.kill(zygote.pid, signal.SIGSTOP)
    pod = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "p1"}

    result = bare_bench.start(bare_bench.bundle("c1", annotations=pod))

    os.kill(zygote.pid, signal.SIGCONT)
    assert (result.returncode, bare_bench.alive()) == (0, [shim["pid"]])


def test_a_request_too_large_for_one_message_is_executed(bare_bench: StartBench) -> None:
    bare_bench.with_zygote()
    environment = {f"LARGE{number}": "x" * 100_000 for number in range(8)}

    found = report(bare_bench, "c1", env=environment)

    assert found["frozen"] == 0
    assert found["reason"].endswith("EMSGSIZE (message too long)")


def fork_by_hand(bench: StartBench, listening_fd: int) -> zygote_client.Forked:
    return zygote_client.fork_daemon(
        str(bench.zygote_dir),
        [sys.executable, "-I", "-S", "daemon"],
        ["serve"],
        environment={"PYSHIM_ZYGOTE_WITHIN_S": "30"},
        listening_fd=listening_fd,
        log_path=os.devnull,
        shim_cgroup="",
    )


def ended(*pids: int) -> None:
    """The processes end soon."""
    deadline = time.monotonic() + 30
    for pid in pids:
        while is_alive(pid):
            assert time.monotonic() < deadline, f"{pid} lives"
            time.sleep(0.005)


CODE = f"import sys; sys.path += {list(import_paths())!r}; from pyshim.__main__ import main; sys.exit(main())"


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="zygote-") as found:  # a short path: a socket's has 107 bytes at most
        yield found


def zygote(*words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", CODE, *words, "zygote"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_it_listens_and_ends_at_sigterm(directory: str) -> None:
    with zygote("-idle", "0", "-directory", directory) as process:
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            listens = Path(address(directory)).is_socket()
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()

    assert (process.returncode, first, err) == (0, b"zygote: ready\n", b"zygote: ended\n")
    assert listens
    assert not Path(address(directory)).exists()


@pytest.mark.parametrize("idle", ["soon", "-1", "nan"])
def test_an_idle_time_that_is_none_is_refused(idle: str) -> None:
    with zygote("-idle", idle) as process:
        _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (1, f"parse flag '-idle': '{idle}' is not a number of seconds\n".encode())


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "word").touch()
    with zygote("-directory", f"{tmp_path}/word") as process:
        _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (1, f"run zygote '{tmp_path}/word': EEXIST (file exists)\n".encode())
