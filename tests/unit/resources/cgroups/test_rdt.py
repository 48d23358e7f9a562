"""Classes of cache and memory bandwidth: the request of a spec, and the tasks written to a resctrl group."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.resources.cgroups.host.sandbox_cgroups import LinuxCgroups, join_rdt_class
from pyshim.resources.cgroups.plan.cgroups import rdt_class

from .cgroups_rig import Rig


@pytest.mark.parametrize(
    ("rdt", "name", "left_out"),
    [
        (None, "", ()),
        ({}, "", ()),
        ({"closID": "gold"}, "gold", ()),
        ({"closID": "/"}, "/", ()),
        ({"closID": "system/default"}, "/", ()),
        (
            {"closID": "gold", "l3CacheSchema": "L3:0=f", "memBwSchema": "", "enableMonitoring": True},
            "gold",
            ("enableMonitoring", "l3CacheSchema"),
        ),
        ({"schemata": ["L3:0=f"]}, "", ("schemata",)),
    ],
)
def test_a_class_is_what_the_runtime_has_written(rdt: object, name: str, left_out: tuple[str, ...]) -> None:
    assert rdt_class({} if rdt is None else {"intelRdt": rdt}) == (name, left_out)


@pytest.mark.parametrize(
    ("rdt", "said"),
    [
        (["gold"], "linux.intelRdt: not an object"),
        ({"closID": 7}, "closID: not a name: '7'"),
        *(({"closID": name}, "is not a directory name") for name in ("..", ".", "a/b", "/a", "a\n", "\0")),
    ],
)
def test_a_name_that_is_not_a_directory_name_is_refused(rdt: object, said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        rdt_class({"intelRdt": rdt})


_THREADS = """
import subprocess, sys, threading
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE)
input()
child.communicate(b"\\n")
"""


def test_every_thread_of_a_program_and_of_its_children_is_moved(tmp_path: Path) -> None:
    (tmp_path / "gold").mkdir()
    tasks = tmp_path / "gold" / "tasks"
    tasks.touch()
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _THREADS], **pipes) as program:
        assert program.stdout is not None
        program.stdout.readline()
        listed = [int(each.name) for each in Path(f"/proc/{program.pid}/task").iterdir()]
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()

        join_rdt_class("gold", (program.pid, 1 << 22), str(tmp_path))
        program.communicate(b"\n")

    assert sorted(map(int, tasks.read_text().split())) == sorted((*listed, *map(int, children)))
    assert len(listed) == 4
    assert len(children) == 1


def test_the_root_group_is_a_class(tmp_path: Path) -> None:
    (tmp_path / "tasks").touch()

    join_rdt_class("/", (1,), str(tmp_path))

    assert "1\n" in (tmp_path / "tasks").read_text()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        pytest.param((), r"gold/tasks': ENOENT .*\(hint: mount -t resctrl", id="not mounted"),
        pytest.param(
            ("schemata",), r"join RDT class 'gold': open '.*gold/tasks': ENOENT [^(]*\([^(]*\)$", id="no such class"
        ),
    ],
)
def test_a_class_that_is_not_there_is_named(tmp_path: Path, files: tuple[str, ...], said: str) -> None:
    for name in files:
        (tmp_path / name).touch()

    with pytest.raises(FailedPrecondition, match=said):
        join_rdt_class("gold", (1,), str(tmp_path))


def test_a_refusal_of_the_kernel_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gold").mkdir()
    (tmp_path / "gold" / "tasks").symlink_to("/dev/full")

    (tmp_path / "info").mkdir()
    (tmp_path / "info" / "last_cmd_status").write_text("No more space\n")

    with pytest.raises(FailedPrecondition, match=r"join RDT class 'gold': ENOSPC .*: No more space$"):
        join_rdt_class("gold", (1,), str(tmp_path))


async def test_a_host_without_resctrl_says_so() -> None:
    cgroups = LinuxCgroups.__new__(LinuxCgroups)
    with pytest.raises(FailedPrecondition, match="'/sys/fs/resctrl/pyshim-test/tasks'"):
        await cgroups.join_class("pyshim-test", (1,))


def test_programs_that_serve_the_guest_have_the_class_of_its_containers() -> None:
    asyncio.run(_classes_of_containers())


async def _classes_of_containers() -> None:
    rig = Rig()
    rig.helper_pids = (60,)
    await rig.start()

    await rig.cgroups.enter_class("c1", {})
    assert "RdtClass" not in rig.cgroups.saved()
    await rig.cgroups.enter_class("c2", {"intelRdt": {"closID": "gold", "memBwSchema": "MB:0=10"}})
    await rig.cgroups.enter_class("c3", {"intelRdt": {"closID": "gold"}})
    with pytest.raises(FailedPrecondition, match=r"join RDT class 'silver': all containers of a VM have one.*'gold'"):
        await rig.cgroups.enter_class("c4", {"intelRdt": {"closID": "silver"}})

    assert rig.host.classes == [("gold", (50, 40, 60))]
    saved = rig.cgroups.saved()
    assert saved["RdtClass"] == "gold"
    assert "container 'c2': linux.intelRdt.memBwSchema is not done for a VM" in list(saved["Notes"])  # type: ignore[call-overload]
