"""The guest agent's settings and addresses."""

from __future__ import annotations

from pathlib import Path

from guest.agent import settings
from guest.agent.transport import find_port


def test_settings_come_from_the_command_line_and_bad_ones_are_listed() -> None:
    words = "quiet agent.log=debug agent.server_addr=unix:///x agent.debug_console agent.hotplug_timeout=7".split()

    found = settings.parse([*words, "agent.container_pipe_size=lots", "agent.debug_console_vport=-1"])

    assert (found.log_level, found.server_addr, found.debug_console) == ("debug", "unix:///x", True)
    assert found.hotplug_timeout_s == 7
    assert found.problems == ["agent.container_pipe_size=lots", "agent.debug_console_vport=-1"]
    assert (found.container_pipe_size, found.debug_console_vport) == (262144, 1026)
    assert not found.crun_fixed_addresses
    assert settings.parse(["agent.crun_fixed_addresses=true"]).crun_fixed_addresses


def test_the_default_address_is_katas() -> None:
    assert settings.parse([]).server_addr == "vsock://-1:1024"


def test_a_port_node_is_taken_as_it_is_and_an_unknown_one_is_not_there(tmp_path: Path) -> None:
    node = tmp_path / "port"
    node.touch()

    assert find_port(str(node)) == str(node)
    assert find_port(str(tmp_path / "no.such.port")) is None
