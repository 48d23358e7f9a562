"""The VM's disks, found by serial number, the forwarder's keys on one of them, and the network interface.

Disk `peerpod-config` has `apf.json`, whose names are those of the cloud API adaptor's daemon configuration. Disk
`peerpod-images`, an OCI image layout, is optional.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from fcntl import ioctl
from struct import pack

from guest.agent import syscalls

log = logging.getLogger(__name__)

CONFIG_DISK = "peerpod-config"
CONFIG = "/run/peerpod/config"
IMAGES_DISK = "peerpod-images"
IMAGES = "/run/peerpod/images"
APF = f"{CONFIG}/apf.json"
INTERFACE = "eth0"

# Seconds to wait for the interface, whose driver may still be loading, and between two looks for it.
_WAIT_S = 120.0
_LOOK_EVERY_S = 0.02
_SET_FLAGS, _SET_ADDRESS, _SET_NETMASK = 0x8914, 0x8916, 0x891C  # SIOCSIF*, linux/sockios.h
_UP = 1


@dataclass(frozen=True, slots=True)
class Keys:
    """PEM texts: the server's certificate and key, and the authority whose clients are accepted."""

    certificate: str
    key: str
    client_authority: str


def mount_disks() -> None:
    """The VM's disks are mounted read-only. OSError without the one with the configuration."""
    for serial, target in ((CONFIG_DISK, CONFIG), (IMAGES_DISK, IMAGES)):
        device = disk_with_serial(serial)
        if device is None:
            if serial == CONFIG_DISK:
                raise FileNotFoundError(2, "no disk with this serial number", serial)
            continue
        os.makedirs(target, exist_ok=True)
        flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        syscalls.mount(device, target, "erofs", flags, "")


def disk_with_serial(serial: str, blocks: str = "/sys/block") -> str | None:
    """The node of the virtio disk that has `serial`."""
    for name in sorted(os.listdir(blocks)):
        try:
            with open(f"{blocks}/{name}/serial", encoding="utf-8", errors="replace") as file:
                found = file.read().strip()
        except OSError:
            continue  # a disk of another kind
        if found == serial:
            return f"/dev/{name}"
    return None


def read_keys(path: str = APF) -> Keys:
    """The keys in the configuration. ValueError names the one that is missing."""
    with open(path, encoding="utf-8") as file:
        members = json.load(file)
    texts = []
    for name in ("tls-server-cert", "tls-server-key", "tls-client-ca"):
        text = members.get(name) if isinstance(members, dict) else None
        if not isinstance(text, str) or not text:
            raise ValueError(f"read '{path}': it has no {name!r}")
        texts.append(text)
    return Keys(*texts)


def bring_up(address: str) -> None:
    """The interface is up with `address` (`A.B.C.D/N`). Its driver may still be loading, so it is waited for."""
    try:
        wanted = ipaddress.IPv4Interface(address)
        if not int(address.rpartition("/")[2]):
            raise ValueError(address)
    except ValueError:
        raise ValueError(f"bring up {INTERFACE}: {address!r} is not A.B.C.D/N") from None
    deadline = time.monotonic() + _WAIT_S
    while not os.path.exists(f"/sys/class/net/{INTERFACE}"):
        if time.monotonic() > deadline:
            raise FileNotFoundError(2, "no such network interface", INTERFACE)
        time.sleep(_LOOK_EVERY_S)
    name = INTERFACE.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, value in ((_SET_ADDRESS, wanted.ip.packed), (_SET_NETMASK, wanted.netmask.packed)):
            ioctl(sock, request, pack("16sHH4s16x", name, socket.AF_INET, 0, value))
        ioctl(sock, _SET_FLAGS, pack("16sH22x", name, _UP))
    log.info("interface is up", extra={"interface": INTERFACE, "address": address})
