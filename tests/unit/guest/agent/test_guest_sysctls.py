"""Kernel settings of a pod: by their files, in the namespaces the containers share."""

from __future__ import annotations

from pathlib import Path

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent

from guest.agent.container.sandbox import sysctl_path
from guest.agent.errors import InvalidArgument


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("net.ipv4.ip_forward", "net/ipv4/ip_forward"),
        ("net/ipv4/ip_forward", "net/ipv4/ip_forward"),
        ("net.ipv4.conf.eth0/1.forwarding", "net/ipv4/conf/eth0.1/forwarding"),
        ("net/ipv4/conf/eth0.1/forwarding", "net/ipv4/conf/eth0.1/forwarding"),
    ],
)
def test_the_first_separator_of_a_name_decides(name: str, path: str) -> None:
    assert sysctl_path(name) == f"/proc/sys/{path}"


@pytest.mark.parametrize("name", ["", "/kernel.x", "net/../../self/mem", "kernel/./x", "kernel//x", "kernel.\0"])
def test_a_name_cannot_lead_elsewhere(name: str) -> None:
    with pytest.raises(InvalidArgument, match="not a name"):
        sysctl_path(name)


@pytest.mark.root
def test_settings_hold_in_every_container_and_not_outside(hosted_agent: HostedAgent, client: AgentClient) -> None:
    outside = Path("/proc/sys/kernel/shmmax").read_text()
    spec = hosted_agent.spec(["cat", "/proc/sys/kernel/shmmax", "/proc/sys/net/core/somaxconn"])
    spec.Linux.Sysctl.update({"kernel.shmmax": "7654321", "net.core.somaxconn": "77"})

    client.run(spec, "tuned")
    client.run(hosted_agent.spec(["cat", "/proc/sys/kernel/shmmax"]), "other")

    assert client.read_all("tuned") == b"7654321\n77\n"
    assert client.read_all("other") == b"7654321\n"
    assert Path("/proc/sys/kernel/shmmax").read_text() == outside


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "value", "cause"), [("net.core.no_such", "1", "no such setting"), ("net.core.somaxconn", "many", "EINVAL")]
)
def test_a_setting_the_kernel_refuses_is_named(
    hosted_agent: HostedAgent, client: AgentClient, name: str, value: str, cause: str
) -> None:
    spec = hosted_agent.spec(["true"])
    spec.Linux.Sysctl.update({name: value})

    with pytest.raises(CallError, match=f"{name}.*{cause}"):
        client.create(spec, "refused")
