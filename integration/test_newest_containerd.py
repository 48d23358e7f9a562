"""What the newest containerd asks of a shim: `CONTAINERD=newest` looks it up and builds it (framework/releases.py).

The messages of its release are compared with ours, and its log is read for warnings about us, so that a change on its
side fails here and not on a node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from protos.containerd import (
    bootstrap_pb2,
    events_pb2,
    sandbox_pb2,
    task_types_pb2,
    task_v2_pb2,
    task_v3_pb2,
    types_pb2,
)
from protos.cri import v1_pb2 as cri_pb2

from .framework import cgroups, releases
from .framework.cri import Cri
from .framework.cri_session import SANDBOX_API_HANDLER, STAND_IN_HANDLER

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("cri")]

OURS = (bootstrap_pb2, events_pb2, sandbox_pb2, task_types_pb2, task_v2_pb2, task_v3_pb2, types_pb2)
MIB = 1 << 20
_ABOUT_US = re.compile(r"pykata|pyshim|runtime-allow-mounts|deprecat", re.IGNORECASE)
_NO_MEMORY = "" if cgroups.has("memory") else "|no controller memory below"
_NOT_OURS = re.compile(rf"cgroup v1|CgroupV1{_NO_MEMORY}", re.IGNORECASE)
"""The tests' host, not the shim."""


@pytest.fixture(scope="module")
def theirs() -> FileDescriptorSet:
    """The protocols of the chosen release, as its own source describes them."""
    release = releases.chosen()
    if not release.api.exists():
        pytest.skip(f"containerd {release.generation} has no {release.api.name} (hint: CONTAINERD=newest)")
    return text_format.Parse(
        release.api.read_text(), FileDescriptorSet(), allow_unknown_extension=True, allow_unknown_field=True
    )


def _messages(package: str, messages: Iterator[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
    for message in messages:
        name = f"{package}.{message.name}"
        yield name, message
        yield from _messages(name, iter(message.nested_type))


def _form(field: FieldDescriptorProto) -> tuple[str, str, str]:
    return field.name, f"{field.Label.Name(field.label)} {field.Type.Name(field.type)}", field.type_name


def test_our_messages_have_every_field_of_containerds(theirs: FileDescriptorSet) -> None:
    """A field that containerd has and we do not know would be answered with success and have no effect."""
    known = {
        name: message
        for file in theirs.file
        for name, message in _messages(file.package, iter(file.message_type))
        if not message.options.map_entry
    }
    compared, different = 0, []
    for module in OURS:
        proto = FileDescriptorSet().file.add()
        module.DESCRIPTOR.CopyToProto(proto)
        for name, message in _messages(proto.package, iter(proto.message_type)):
            if name not in known:
                continue
            compared += 1
            ours, wanted = ({f.number: _form(f) for f in one.field} for one in (message, known[name]))
            different += [f"{name}: {number} is {form}" for number, form in wanted.items() if ours.get(number) != form]

    assert compared > 80
    assert different == []


def test_we_serve_every_method_that_containerd_may_call(theirs: FileDescriptorSet) -> None:
    services: dict[str, ServiceDescriptorProto] = {
        f"{file.package}.{service.name}": service for file in theirs.file for service in file.service
    }
    for module in (task_v2_pb2, task_v3_pb2, sandbox_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            ours = {method.name for method in service.methods}
            assert {method.name for method in services[service.full_name].method} == ours


@pytest.mark.parametrize("handler", [STAND_IN_HANDLER, SANDBOX_API_HANDLER])
def test_containerd_warns_of_nothing_about_us(cri: Cri, handler: str) -> None:
    before = cri.daemon.log_size()

    with cri.pod(handler=handler) as pod:
        container = pod.start()
        cri.call("ListContainerStats")
        container.stop(0)

    warnings = [line for line in cri.daemon.shim_log(before).splitlines() if "level=warning" in line]
    assert [line for line in warnings if _ABOUT_US.search(line) and not _NOT_OURS.search(line)] == []


def test_new_resources_of_a_pod_reach_its_vm_or_are_refused(cri: Cri) -> None:
    """The VM of a fixed size has the limits already, or containerd hears that it has not."""
    if releases.chosen().numbers < (2, 4):
        pytest.skip("containerd sends the resources of a sandbox from 2.4 on")
    with cri.pod(handler=SANDBOX_API_HANDLER) as pod:
        small = cri_pb2.LinuxContainerResources(cpu_period=100_000, cpu_quota=50_000, memory_limit_in_bytes=64 * MIB)
        cri.call("UpdatePodSandboxResources", pod_sandbox_id=pod.id, resources=small)

        large = cri_pb2.LinuxContainerResources(cpu_period=100_000, cpu_quota=6_400_000)
        with pytest.raises(grpc.RpcError, match=f"update sandbox '{pod.id}'"):
            cri.call("UpdatePodSandboxResources", pod_sandbox_id=pod.id, resources=large)
