"""The guest agent's settings and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from guest.agent import settings
from guest.agent.transport import find_port


def test_settings_come_from_the_command_line_and_bad_ones_are_listed() -> None:
    words = "quiet agent.log=debug agent.server_addr=unix:///x agent.debug_console agent.hotplug_timeout=7".split()

    found = settings.parse([*words, "agent.container_pipe_size=lots", "agent.debug_console_vport=-1"])

    assert (found.log_level, found.server_addr, found.debug_console) == ("debug", "unix:///x", True)
    assert found.hotplug_timeout_s == 7
    assert found.problems == ["agent.container_pipe_size=lots", "agent.debug_console_vport=-1"]
    assert (found.container_pipe_size, found.debug_console_vport) == (262144, 1026)


def test_the_default_address_is_katas() -> None:
    assert settings.parse([]).server_addr == "vsock://-1:1024"


def test_a_port_node_is_taken_as_it_is_and_an_unknown_one_is_not_there(tmp_path: Path) -> None:
    node = tmp_path / "port"
    node.touch()

    assert find_port(str(node)) == str(node)
    assert find_port(str(tmp_path / "no.such.port")) is None


@pytest.mark.parametrize(
    ("command_line", "found"),
    [
        ("quiet forwarder.port=15150 agent.server_addr=unix:///run/a.sock", (15150, "", "/run/a.sock")),
        ("forwarder.address=10.0.2.15/24 forwarder.port=1 agent.server_addr=unix:///a", (1, "10.0.2.15/24", "/a")),
        ("agent.server_addr=unix:///run/a.sock", None),
        ("forwarder.port=15150", None),
        ("forwarder.port=0 agent.server_addr=unix:///a", None),
        ("forwarder.port=65536 agent.server_addr=unix:///a", None),
        ("forwarder.port=x agent.server_addr=unix:///a", None),
        ("forwarder.port=15150 agent.server_addr=vsock://-1:1024", None),
    ],
)
def test_the_command_line_decides_about_the_forwarder(command_line: str, found: tuple[int, str, str] | None) -> None:
    asked = settings.parse(command_line.split())

    assert (asked.forwarder and (asked.forwarder.port, asked.forwarder.address, asked.forwarder.agent)) == found
    assert bool(asked.problems) == (found is None and "forwarder" in command_line)
