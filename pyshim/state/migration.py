"""Brings a state that an older pyshim wrote to the newest version, one version at a time.

A step works on the JSON document itself, so that it stays as it is when the classes change. It adds what the older
version could not say, and keeps every entry of the ledger.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pyshim.state.errors import StateDamaged


def migrated(document: Any, key: str, version: int, where: str) -> dict[str, Any]:
    """A copy of `document` whose object `key` has the newest version. Raises StateDamaged for no version at all."""
    if version not in _STEPS:
        raise StateDamaged(f"read state {where!r}: version {version} was never written by any pyshim")
    copy: dict[str, Any] = deepcopy(document)
    while version in _STEPS:
        try:
            _STEPS[version](copy, copy[key])
        except (KeyError, TypeError, AttributeError) as error:
            raise StateDamaged(f"read state {where!r}: not what version {version} wrote: {error!r}") from error
        version += 1
        copy[key]["Version"] = version
    return copy


def _from_1(kata: dict[str, Any], ours: dict[str, Any]) -> None:
    """Version 2 keeps what a later daemon needs to take the sandbox over: execs, stream positions, resources."""
    snapshot = ours.get("Snapshot")
    if snapshot is None:
        return
    containers = snapshot["Containers"]
    # Version 1 kept the sandbox's own container first.
    snapshot.setdefault("Owner", containers[0]["ID"] if containers else "")
    snapshot.setdefault("SandboxConfig", {})
    snapshot.setdefault("Hypervisor", kata.get("HypervisorState", {}))
    for container in containers:
        container.setdefault("Moved", {"Stdin": 0, "Stdout": 0, "Stderr": 0})
        container.setdefault("Execs", [])
        for name in ("Annotations", "Resources"):
            container.setdefault(name, {})
        for name in ("DeviceMaps", "Mounts"):
            container.setdefault(name, [])
    kata.setdefault("Devices", [])
    network: Mapping[str, Any] = kata.setdefault("Network", {})
    if isinstance(network, dict):
        network.setdefault("Endpoints", [])


def _from_2(_kata: dict[str, Any], ours: dict[str, Any]) -> None:
    """Version 3 ends in a checksum, and a file that is no socket has a kind of its own."""
    for entry in ours["Ledger"]:
        name = str(entry["Key"]).rpartition("/")[2]
        if entry["Kind"] == "socket" and name in ("disk.img", ours["SandboxID"]):
            entry["Kind"] = "file"


_STEPS = {1: _from_1, 2: _from_2}
