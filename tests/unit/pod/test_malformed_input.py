"""JSON of the right syntax and the wrong shape, member by member: refused as the caller's mistake, never a crash.

Each member is tried with one wrong value, the members in turn with another one; the slow tests try all values.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.task import ExecTask
from tests.unit.pod.conftest import NO_STDIO, Stack

C1 = ContainerId("c1")
WRONG: tuple[Any, ...] = (None, -1, 1 << 70, 0.5, "\ud800", [5], [None], {"x": 5})
USER = {"uid": 1, "gid": 1, "additionalGids": [1], "username": "u"}
CAPABILITIES = {name: ["CAP_CHOWN"] for name in ("bounding", "effective", "permitted")}
PROCESS: Mapping[str, Any] = {
    "args": ["sleep"],
    "env": ["A=1"],
    "cwd": "/",
    "terminal": False,
    "consoleSize": {"height": 1, "width": 1},
    "user": USER,
    "capabilities": CAPABILITIES,
    "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1, "soft": 1}],
    "noNewPrivileges": True,
    "oomScoreAdj": 1,
}
RESOURCES: Mapping[str, Any] = {
    "cpu": {"shares": 2, "quota": 1000, "period": 1000, "cpus": "0", "mems": "0"},
    "memory": {"limit": 1 << 20, "swap": 1 << 20},
    "hugepageLimits": [{"pageSize": "2MB", "limit": 1 << 21}],
    "pids": {"limit": 5},
    "unified": {"memory.high": "5"},
    "blockIO": {"weight": 5, "throttleReadBpsDevice": [{"major": 1, "minor": 1, "rate": 5}]},
}
SPEC: Mapping[str, Any] = {
    "ociVersion": "1.0.2",
    "process": PROCESS,
    "root": {"path": "rootfs", "readonly": True},
    "hostname": "h",
    "annotations": {"example.org/a": "b"},
    "mounts": [{"destination": "/d", "type": "bind", "source": "/s", "options": ["ro"]}],
    "linux": {
        "resources": RESOURCES,
        "namespaces": [{"type": "pid", "path": ""}],
        "sysctl": {"net.core.somaxconn": "77"},
        "devices": [{"path": "/dev/null", "type": "c", "major": 1, "minor": 3, "fileMode": 438, "uid": 0, "gid": 0}],
        "cgroupsPath": "/pod/c1",
        "maskedPaths": ["/proc/kcore"],
        "readonlyPaths": ["/proc/sys"],
        "seccomp": {
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": ["SCMP_ARCH_X86_64"],
            "syscalls": [{"names": ["mkdir"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 0, "value": 1}]}],
        },
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, Mapping):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def wrong(value: Any, path: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[Any]:
    """`value`, with each of `values` at `path`, where it does not belong."""
    for each in values:
        changed = copy.deepcopy(value)
        inner = changed
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = each
        yield json.loads(json.dumps(changed))


def cases(value: Any) -> pytest.MarkDecorator:
    params = []
    for number, path in enumerate(places(value)):
        name = ".".join(map(str, path))
        turn = number % len(WRONG)
        params.append(pytest.param(path, WRONG[turn : turn + 1], id=name))
        params.append(pytest.param(path, WRONG[:turn] + WRONG[turn + 1 :], id=f"{name}-others", marks=pytest.mark.slow))
    return pytest.mark.parametrize(("path", "values"), params)


REFUSALS = (InvalidArgument, FailedPrecondition, NotFound)


@cases(SPEC)
async def test_a_spec_is_refused_or_accepted(path: tuple[Any, ...], values: tuple[Any, ...], stack: Stack) -> None:
    for spec in wrong(SPEC, path, values):
        request = stack.request("c1", ["sleep"])
        stack.host.files[f"{request.bundle}/config.json"] = json.dumps(spec).encode()
        try:
            await stack.pod.create(request)
        except REFUSALS:
            continue
        await stack.pod.delete(C1, None)


@cases(PROCESS)
async def test_an_added_process_is_refused_or_accepted(
    path: tuple[Any, ...], values: tuple[Any, ...], stack: Stack
) -> None:
    await stack.run("c1", ["sleep"])
    for number, process in enumerate(wrong(PROCESS, path, values)):
        exec_id = ExecId(f"e{number}")
        try:
            await stack.pod.exec(
                ExecTask(container_id=C1, exec_id=exec_id, stdio=NO_STDIO, process={**process, "terminal": False})
            )
            await stack.pod.start(C1, exec_id)
        except REFUSALS:
            continue


@cases(RESOURCES)
async def test_an_update_is_refused_or_accepted(path: tuple[Any, ...], values: tuple[Any, ...], stack: Stack) -> None:
    await stack.run("c1", ["sleep"])
    for resources in wrong(RESOURCES, path, values):
        try:
            await stack.pod.update(C1, resources)
        except REFUSALS:
            continue


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("uidMappings", [{"containerID": 0, "hostID": 65536, "size": 65536}]),
        ("gidMappings", [{"containerID": 0, "hostID": 65536, "size": 65536}]),
        ("netDevices", {"eth1": {"name": "eth1"}}),
        ("memoryPolicy", {"mode": "MPOL_BIND", "nodes": "0"}),
    ],
)
async def test_what_no_guest_can_have_is_refused_by_name_before_anything_is_made(
    member: str, value: Any, stack: Stack
) -> None:
    request = stack.request("c1", ["sleep"])
    spec = copy.deepcopy(dict(SPEC))
    spec["linux"] = {**spec["linux"], member: value}
    stack.host.files[f"{request.bundle}/config.json"] = json.dumps(spec).encode()

    with pytest.raises(Unimplemented, match=rf"linux\.{member}: "):
        await stack.pod.create(request)

    assert stack.pod.is_empty
