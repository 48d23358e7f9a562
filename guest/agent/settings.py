"""The agent's settings on the kernel command line, with kata-agent's names and defaults if it has them."""

from __future__ import annotations

from typing import NamedTuple

VISIBLE_DEVICES = "VISIBLE_CDI_DEVICES"
"""The variable by which a container chooses devices of the guest, with `agent.visible_cdi_devices`."""
# Parameter -> attribute of Settings.
_NUMBERS = {
    "agent.cdi_timeout": "cdi_timeout_s",
    "agent.container_pipe_size": "container_pipe_size",
    "agent.debug_console_vport": "debug_console_vport",
    "agent.hotplug_timeout": "hotplug_timeout_s",
    "agent.image_pull_timeout": "image_pull_timeout_s",
}


class Settings:
    """Parsed words of the command line; a malformed value keeps the default and is listed in `problems`."""

    def __init__(self) -> None:
        self.server_addr = "vsock://-1:1024"
        """`vsock://CID:PORT` (CID -1: any), `serial:///dev/virtio-ports/NAME` or `unix://PATH`."""
        self.log_level = "info"
        self.debug_console = False
        self.debug_console_vport = 1026
        self.hotplug_timeout_s = 30.0
        """Seconds that a call waits for a device. kata-agent has 3 s, too short for a guest on a busy host."""
        self.container_pipe_size = 256 << 10
        """Bytes of each stdio pipe, 0 for the kernel's default. 256 KiB because the shim reads pieces of that size:
        under emulation the number of pieces costs time, not the bytes."""
        self.cdi_timeout_s = 100.0
        """Seconds that CreateContainer waits for the CDI spec of a device asked for by name."""
        self.visible_cdi_devices = False
        """A container may choose devices of the guest by its environment."""
        self.image_source = ""
        """The source of images that are pulled here: `http://HOST[:PORT]` (a registry) or `oci:PATH` (an OCI image
        layout). kata-agent has no such setting."""
        self.image_pull_timeout_s = 1200.0
        self.forwarder: ForwarderSettings | None = None
        self.problems: list[str] = []


class ForwarderSettings(NamedTuple):
    """`forwarder.port` and `forwarder.address`: the agent's socket `agent` is reached over TCP and TLS, see
    `guest.forwarder`.

    `address` is the interface's IPv4 address with its prefix length, "" to leave the interface alone.
    """

    port: int
    address: str
    agent: str


def parse(words: list[str]) -> Settings:
    """Settings from kernel command-line words; later words win, words of other programs are ignored."""
    asked = dict(word.partition("=")[::2] for word in words)
    settings = Settings()
    settings.server_addr = asked.get("agent.server_addr") or settings.server_addr
    settings.log_level = asked.get("agent.log") or settings.log_level
    settings.image_source = asked.get("agent.image_source", "")
    settings.debug_console = _is_on(asked, "agent.debug_console")
    settings.visible_cdi_devices = _is_on(asked, "agent.visible_cdi_devices")
    for key, value in asked.items():
        attribute = _NUMBERS.get(key)
        if attribute is None:
            continue
        if value.isascii() and value.isdigit() and len(value) < 10:
            setattr(settings, attribute, int(value))
        else:
            settings.problems.append(f"{key}={value}")
    if asked.get("forwarder.port"):
        settings.forwarder = _forwarder(asked, settings)
    return settings


def _is_on(asked: dict[str, str], key: str) -> bool:
    return key in asked and asked[key] not in ("0", "false")


def _forwarder(asked: dict[str, str], settings: Settings) -> ForwarderSettings | None:
    port = asked["forwarder.port"]
    scheme, _, agent = settings.server_addr.partition("://")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not (is_port and scheme == "unix" and agent.startswith("/")):
        settings.problems.append(f"forwarder.port={port} (it must be 1-65535, with agent.server_addr=unix:///PATH)")
        return None
    return ForwarderSettings(int(port), asked.get("forwarder.address", ""), agent)
