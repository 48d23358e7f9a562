"""What the kernel command line asks of the agent. Names and defaults are kata-agent's where it has them."""

from __future__ import annotations


class Settings:
    """Parsed `agent.*` words; a malformed value keeps the default and is listed in `problems`.

    `server_addr`: `vsock://-1:1024`, `serial:///dev/virtio-ports/NAME` or `unix://PATH`.
    `container_pipe_size`: bytes of each stdio pipe, 0 leaves the kernel's default. The shim reads pieces of 256 KiB,
    and what costs time under emulation is the piece, not the byte. `hotplug_timeout_s`: how long a call waits for a
    device to appear; `cdi_timeout_s`: for the spec of a device asked for by name. `visible_cdi_devices`: a container
    may choose among the guest's devices by its environment. `image_source`: where images come from that are pulled
    here, `http://HOST[:PORT]` (a registry) or `oci:PATH` (an OCI image layout); the agent's own word.
    `crun_fixed_addresses`: crun has the same addresses at each of its starts; the agent's own word, too.
    """

    __slots__ = (
        "cdi_timeout_s",
        "container_pipe_size",
        "crun_fixed_addresses",
        "debug_console",
        "debug_console_vport",
        "hotplug_timeout_s",
        "image_pull_timeout_s",
        "image_source",
        "log_level",
        "problems",
        "server_addr",
        "visible_cdi_devices",
    )

    def __init__(self) -> None:
        self.server_addr = "vsock://-1:1024"
        self.log_level = "info"
        self.debug_console = False
        self.debug_console_vport = 1026
        self.hotplug_timeout_s = 3.0
        self.container_pipe_size = 256 << 10
        self.crun_fixed_addresses = False
        self.cdi_timeout_s = 100.0
        self.visible_cdi_devices = False
        self.image_source = ""
        self.image_pull_timeout_s = 1200.0
        self.problems: list[str] = []


def parse(words: list[str]) -> Settings:
    """Settings from kernel command-line words; later words win, words that are not the agent's are ignored."""
    settings = Settings()
    for word in words:
        key, _, value = word.partition("=")
        if key == "agent.server_addr" and value:
            settings.server_addr = value
        elif key == "agent.log" and value:
            settings.log_level = value
        elif key == "agent.debug_console":
            settings.debug_console = value not in ("0", "false")
        elif key == "agent.debug_console_vport":
            settings.debug_console_vport = int(_number(settings, word, value, settings.debug_console_vport))
        elif key == "agent.hotplug_timeout":
            settings.hotplug_timeout_s = _number(settings, word, value, settings.hotplug_timeout_s)
        elif key == "agent.image_source":
            settings.image_source = value
        elif key == "agent.image_pull_timeout":
            settings.image_pull_timeout_s = _number(settings, word, value, settings.image_pull_timeout_s)
        elif key == "agent.container_pipe_size":
            settings.container_pipe_size = int(_number(settings, word, value, settings.container_pipe_size))
        elif key == "agent.crun_fixed_addresses":
            settings.crun_fixed_addresses = value not in ("0", "false")
        elif key == "agent.cdi_timeout":
            settings.cdi_timeout_s = _number(settings, word, value, settings.cdi_timeout_s)
        elif key == "agent.visible_cdi_devices":
            settings.visible_cdi_devices = value not in ("0", "false")
    return settings


def _number(settings: Settings, word: str, value: str, default: float) -> float:
    if value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    settings.problems.append(word)
    return default
