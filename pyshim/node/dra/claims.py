"""Claims prepared on this node. Each has a device spec (CDI), which containerd needs, and a record.

The device is not on this node, so the spec only sets a variable that names the claim: CDI refuses a device without
edits. The record has the answer to the kubelet, which a restarted driver gives again; its last line is the checksum of
what is before it, since another digit would be another pod's device.
"""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pyshim.host.files import replace_file
from pyshim.model.decoding import damaged, decoded, from_json
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.node.dra.slices import DRIVER, POOL, product_of
from pyshim.resources.devices.plan.instances import VENDOR

log = logging.getLogger(__name__)

VARIABLE = "PYSHIM_CLAIM"
_UID = re.compile(r"[a-zA-Z0-9-]{1,64}")
_DEVICE = re.compile(r"(?=.{1,63}\Z)[a-z](?:[a-z0-9-]*[a-z0-9])?-[0-9]+")
"""A product and a number, as `slices.device_name` makes it: the product is the class of a CDI spec."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a claim, in the kubelet's terms."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi: str


class _Result(msgspec.Struct, frozen=True):
    request: str
    driver: str
    pool: str
    device: str


class _Devices(msgspec.Struct, frozen=True):
    results: tuple[_Result, ...] = ()


class _Allocation(msgspec.Struct, frozen=True):
    devices: _Devices = _Devices()


class _ClaimStatus(msgspec.Struct, frozen=True):
    allocation: _Allocation | None = None


class _Metadata(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    uid: str


class _Claim(msgspec.Struct, frozen=True):
    """The parts of a ResourceClaim that are read here."""

    metadata: _Metadata
    status: _ClaimStatus = _ClaimStatus()


def allocated(document: Mapping[str, Any], uid: str) -> tuple[Prepared, ...]:
    """The devices of this driver that are allocated to the claim. Raises FailedPrecondition, InvalidArgument naming
    it."""
    claim = decoded(document, _Claim, lambda problem: InvalidArgument(f"prepare claim {uid}: {problem}"))
    doing = f"prepare claim '{claim.metadata.namespace}/{claim.metadata.name}'"
    if claim.metadata.uid != uid:
        raise FailedPrecondition(f"{doing}: another claim has this name by now")
    if claim.status.allocation is None:
        raise FailedPrecondition(f"{doing}: it is not allocated")
    results = [each for each in claim.status.allocation.devices.results if each.driver == DRIVER]
    if not results:
        raise FailedPrecondition(f"{doing}: it has no device of {DRIVER}")
    requests: dict[str, list[str]] = {}
    for each in results:
        if each.pool != POOL or not _DEVICE.fullmatch(each.device):
            raise InvalidArgument(f"{doing}: device {each.device[:100]!r} of pool {each.pool[:100]!r} is unknown")
        requests.setdefault(each.device, []).append(each.request)
    return tuple(
        Prepared(requests=tuple(names), pool=POOL, device=device, cdi=f"{VENDOR}/{product_of(device)}={device}")
        for device, names in requests.items()
    )


class Claims:
    """The claims prepared on this node, in two directories: device specs in `specs`, records in `records`."""

    def __init__(self, *, specs: Path, records: Path) -> None:
        self._specs = specs
        self._records = records

    def recorded(self, uid: str) -> tuple[Prepared, ...]:
        """The devices prepared for the claim; empty if there are none, or the record is damaged.

        Raises InvalidArgument for a malformed uid.
        """
        record = self._record(uid)
        refused = damaged(str(record), FailedPrecondition)
        try:
            body, _, checksum = record.read_bytes().rpartition(b"\n")
            if checksum != _checksum(body):
                raise refused("its checksum is wrong")
            return from_json(body, tuple[Prepared, ...], refused)
        except FileNotFoundError:
            return ()
        except FailedPrecondition as error:
            log.warning("record of a claim made anew", extra={"claim": uid, "error": str(error)})
            return ()

    def prepare(self, uid: str, name: str, devices: Sequence[Prepared]) -> None:
        """The claim's specs and then its record are on disk. Idempotent. Raises FailedPrecondition for a full disk."""
        record = self._record(uid)
        try:
            for product in sorted({product_of(each.device) for each in devices}):
                spec = _spec(product, name, [each.device for each in devices if product_of(each.device) == product])
                self._specs.mkdir(parents=True, exist_ok=True)
                path = self._specs / _file_name(product, uid)
                replace_file(str(path), msgspec.json.encode(spec), mode=0o644, durable=False)
            record.parent.mkdir(parents=True, exist_ok=True)
            body = msgspec.json.encode(devices)
            replace_file(str(record), body + b"\n" + _checksum(body), mode=0o600, durable=True)
        except OSError as error:
            self.unprepare(uid)
            raise FailedPrecondition(f"prepare claim {name!r}: {error.strerror}: '{error.filename}'") from error

    def unprepare(self, uid: str) -> None:
        """The claim's specs and record are removed. Idempotent. Raises FailedPrecondition."""
        record = self._record(uid)
        try:
            for path in self._specs.glob(_file_name("*", uid)):
                path.unlink(missing_ok=True)
            record.unlink(missing_ok=True)
        except OSError as error:
            raise FailedPrecondition(f"remove claim {uid}: {error.strerror}: '{error.filename}'") from error

    def _record(self, uid: str) -> Path:
        if not _UID.fullmatch(uid):
            raise InvalidArgument(f"use claim {uid[:100]!r}: not a uid")
        return self._records / f"{uid}.json"


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _file_name(product: str, uid: str) -> str:
    return f"{VENDOR}-{product}_{uid}.json"


def _spec(product: str, claim: str, devices: Sequence[str]) -> dict[str, Any]:
    edits = {"env": [f"{VARIABLE}={claim}"]}
    return {
        "cdiVersion": "0.6.0",
        "kind": f"{VENDOR}/{product}",
        "devices": [{"name": device, "containerEdits": edits} for device in devices],
    }
