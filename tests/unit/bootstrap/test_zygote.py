"""The zygote: what it forks is what an exec would have made, and whatever is wrong with it nobody notices."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from start_bench import REPOSITORY, StartBench, children_of, is_forked, report

from pyshim.bootstrap import zygote as link

NOT_COMPARED = {"pid", "session", "parent", "random", "frozen", "fds", "heap"}


def expected_of_a_heap() -> list[str]:
    """What /proc/PID/smaps says of a fork's: small pages, and merged if equal; as far as the kernel can."""
    features = {"nh": "transparent_hugepage", "mg": "ksm"}
    return [flag for flag, feature in features.items() if Path("/sys/kernel/mm", feature).exists()]


def made_at(address: Path) -> None:
    """`address` exists: the zygote listens there."""
    deadline = time.monotonic() + 60
    while not address.exists():
        assert time.monotonic() < deadline, f"no zygote at {address}"
        time.sleep(0.005)


def test_the_daemon_is_forked_where_a_zygote_is_and_executed_where_none_is(bare_bench: StartBench) -> None:
    executed = report(bare_bench, "c1")
    bare_bench.with_zygote()

    assert executed["frozen"] == 0
    assert is_forked(bare_bench, "c2")


def test_a_forked_daemon_is_what_an_executed_one_is(bare_bench: StartBench) -> None:
    """The caller's limits, umask, niceness, OOM score and environment are not those of the zygote."""
    shell = "ulimit -n 777; ulimit -c 0; umask 027; echo 1000 > /proc/self/oom_score_adj; renice -n 19 $$ >/dev/null"
    # Whoever runs the tests in the background may ignore them.
    wrapper = ["env", "--default-signal=HUP,INT,QUIT"]
    options: dict[str, Any] = {"shell": shell, "env": {"LC_ODD": "a=b\nc"}, "wrapper": wrapper}
    executed = report(bare_bench, "c1", **options)
    bare_bench.with_zygote()
    bare_bench.sockets.joinpath(executed_socket(bare_bench)).unlink()

    forked = bare_bench.ask(bare_bench.start(bare_bench.root / "c1", **options).stdout.decode())

    assert forked["parent"] == bare_bench.zygote.pid  # type: ignore[union-attr]
    assert (executed["oom_score_adj"], executed["nice"], executed["umask"]) == (1000, 19, "Umask:\t0027")
    assert {k: v for k, v in forked.items() if k not in NOT_COMPARED} == {
        k: v for k, v in executed.items() if k not in NOT_COMPARED
    }
    assert forked["session"] == forked["pid"]
    assert {fd: kind(target) for fd, target in forked["fds"].items()} == {
        fd: kind(target) for fd, target in executed["fds"].items()
    }
    assert forked["collects"]
    assert forked["frozen"] > 1000
    assert (executed["heap"], forked["heap"]) == ([], expected_of_a_heap())


def executed_socket(bench: StartBench) -> str:
    (path,) = bench.sockets.iterdir()
    return path.name


def kind(target: str) -> str:
    return target.partition(":")[0]


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
        "print(len(os.listdir('/proc/self/task')), asyncio._get_running_loop(), len(os.listdir('/proc/self/fd')))"
    )
    command = [sys.executable, "-I", "-S", "-c", script, str(REPOSITORY), *packages]

    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert out.split() == ["1", "None", "4"]  # 0, 1, 2 and that of the listing


@pytest.mark.root
def test_a_caller_in_another_namespace_is_refused_and_executes(bare_bench: StartBench) -> None:
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, timeout=30).returncode != 0:
        pytest.skip("a namespace cannot be made here")
    zygote = bare_bench.with_zygote()
    bundle = bare_bench.bundle("c1")
    driver = bare_bench.popen(bundle, bare_bench.words("c1"), stdin=subprocess.DEVNULL, wrapper=["unshare", "--uts"])

    out, err = driver.communicate(timeout=30)

    assert (driver.returncode, err) == (0, b"")
    assert bare_bench.ask(out.decode())["frozen"] == 0
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
            with socket.socket(socket.AF_UNIX) as sock:
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
    [b"", b"\0", b"\0\0\0\5hello", b"\xff\xff\xff\xff", b"\0\0\0\x05" + b"9\0" + b"9\0" + b"\0"],
    ids=["nothing", "cut", "no counts", "huge", "counts that lie"],
)
def test_a_request_that_is_none_is_refused_and_the_zygote_goes_on(bare_bench: StartBench, request_bytes: bytes) -> None:
    zygote = bare_bench.with_zygote()
    (path,) = (p for p in bare_bench.zygote_dir.iterdir() if p.is_socket())
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(path))
        sock.sendall(request_bytes)
        sock.shutdown(socket.SHUT_WR)

        assert sock.recv(1000).startswith(b"no: ")

    assert is_forked(bare_bench, "c1"), zygote.said


def test_a_zygote_whose_code_has_changed_ends_and_what_it_forked_stays(bare_bench: StartBench) -> None:
    tree = bare_bench.root / "tree"
    shutil.copytree(REPOSITORY / "pyshim", tree / "pyshim", ignore=shutil.ignore_patterns("__pycache__"))
    time.sleep(0.2)  # files that changed just before a zygote began count as changed while it was importing
    zygote = bare_bench.with_zygote(repository=tree)
    bare_bench.repository = tree
    first = report(bare_bench, "c1")
    (tree / "pyshim" / "zygote" / "server.py").touch()

    second = report(bare_bench, "c2")

    assert (first["parent"], second["frozen"]) == (zygote.pid, 0)
    assert zygote.process.wait(30) == 0
    assert "the code on disk has changed" in zygote.said
    assert sorted(bare_bench.alive()) == sorted([first["pid"], second["pid"]])
    assert not [p for p in bare_bench.zygote_dir.iterdir() if p.is_socket()]


@pytest.mark.parametrize(
    ("text", "expected"), [("2.5", 2.5), ("", 0.05), ("soon", 0.05), ("0", 0.05), ("-1", 0.05), ("nan", 0.05)]
)
def test_the_limit_can_be_another(text: str, expected: float) -> None:
    assert link._patience_s({"PYSHIM_ZYGOTE_WITHIN_S": text}) == expected


def test_another_version_has_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    before = link.address("/run/x")
    monkeypatch.setattr("pyshim.__version__", "999")

    assert link.address("/run/x") != before


def test_a_zygote_nobody_asks_ends_itself(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote(idle_s=0.05)

    assert zygote.process.wait(30) == 0
    assert not [p for p in bare_bench.zygote_dir.iterdir() if p.is_socket()]


def test_a_second_zygote_of_the_same_code_ends_at_once(bare_bench: StartBench) -> None:
    first = bare_bench.with_zygote()
    second = subprocess.run(first.process.args, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    assert (second.returncode, second.stderr) == (0, "zygote: another zygote serves here already\n")
    assert is_forked(bare_bench, "c1")


def test_the_socket_of_a_dead_zygote_is_no_obstacle(bare_bench: StartBench) -> None:
    dead = bare_bench.with_zygote()
    dead.process.kill()
    dead.process.wait(30)

    assert report(bare_bench, "c1")["frozen"] == 0
    bare_bench.with_zygote()
    assert is_forked(bare_bench, "c2")


def test_the_first_start_makes_a_zygote_where_that_is_wanted(bare_bench: StartBench, tmp_path: Path) -> None:
    """The launcher is asked for `zygote`; here it notes the words and its descriptors."""
    daemon = bare_bench.root / "daemon.py"
    noted = bare_bench.root / "noted"
    fake = Path(__file__).parent / "fake_daemon.py"
    daemon.write_text(
        "import os, sys, runpy\n"
        "if sys.argv[-1] == 'zygote':\n"
        f"    open({str(noted)!r} + '.new', 'w').write(' '.join(sys.argv[1:]) + ' ' + os.readlink('/proc/self/fd/1'))\n"
        f"    os.rename({str(noted)!r} + '.new', {str(noted)!r})\n"
        "else:\n"
        f"    runpy.run_path({str(fake)!r}, run_name='__main__')\n"
    )

    found = report(bare_bench, "c1", daemon=daemon, env={"PYSHIM_ZYGOTE": "auto"})

    made_at(noted)
    assert found["frozen"] == 0
    assert noted.read_text() == f"-idle 600 -directory {bare_bench.zygote_dir} zygote /dev/null"


def test_a_zygote_that_is_on_its_way_up_is_not_made_twice(bare_bench: StartBench) -> None:
    bare_bench.zygote_dir.mkdir()
    lock = os.open(f"{link.address(str(bare_bench.zygote_dir))}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before = children_of(os.getpid())

    link.launch(["/no/such/program"], {}, str(bare_bench.zygote_dir))

    os.close(lock)
    assert children_of(os.getpid()) == before


@pytest.mark.parametrize("choice", ["off", "core"])
def test_the_zygote_is_not_used_where_that_is_not_wanted(bare_bench: StartBench, choice: str) -> None:
    zygote = bare_bench.with_zygote()
    environment = {"PYSHIM_ZYGOTE": "off"} if choice == "off" else {"SCHED_CORE": "1"}

    result = bare_bench.start(bare_bench.bundle("c1"), env=environment)

    if choice == "off" or result.returncode == 0:  # core scheduling needs a kernel that has it
        assert bare_bench.ask(result.stdout.decode())["frozen"] == 0
    assert "refused" not in zygote.said


def test_many_starts_at_once_are_all_answered(bare_bench: StartBench) -> None:
    bare_bench.with_zygote()
    bundles = [bare_bench.bundle(f"c{n}") for n in range(8)]

    processes = [bare_bench.popen(bundle, bare_bench.words(bundle.name)) for bundle in bundles]
    results = [(*process.communicate(timeout=60), process.returncode) for process in processes]

    assert {result[1:] for result in results} == {(b"", 0)}
    assert len({bare_bench.ask(result[0].decode())["pid"] for result in results}) == 8
