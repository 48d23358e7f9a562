"""The operator's table of instance types: which devices a remote VM can have, how many, and the type for a pod. Pure.

`pyshim dra run` offers the devices to the scheduler, and the shim of a remote sandbox chooses the type from those that
the pod was given. docs/DRA.md describes the file.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation

import msgspec

from pyshim.model.decoding import from_toml
from pyshim.model.devices import DeviceRequest
from pyshim.model.errors import FailedPrecondition, InvalidArgument

VENDOR = "pyshim.io"
"""Of the device names that the driver gives to a pod on its node: `pyshim.io/<product>=<device>`."""
MAX_BYTES = 1 << 20
MOST_OFFERED = 4096
"""Devices of one product: 64 slices of the API server."""
_WORD = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Products and quotas: a label of DNS, with room for a number behind it."""


class Product(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device, whole or a partition."""

    kind: str
    """In the guest's own device specs: `nvidia.com/gpu`."""
    model: str = ""
    memory_mib: int = 0
    attributes: dict[str, str | int | bool] = {}
    """Further ones, for selectors of claims."""
    count: int = 0
    """How many the cloud gives at once; 0 for a product with a quota."""
    quota: str = ""
    units: int = 0
    """Of the quota that one device takes."""


class InstanceType(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    vcpus: int
    memory_mib: int
    device: str
    devices: int
    price: str = ""
    """A number, in the same currency for all types. Types without a price are tried last."""


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A supply that several products share, such as a cloud's limit for a family, or a device that can be divided."""

    units: int


class InstanceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: tuple[InstanceType, ...]
    device: dict[str, Product]
    quota: dict[str, Quota] = {}
    nodes: dict[str, str] = {}
    """Labels of the nodes that can make such VMs; none means all nodes."""

    def offered(self, product: str) -> int:
        """How many devices of the product are offered: more than a quota has units for are never given."""
        found = self.device[product]
        return self.quota[found.quota].units // found.units if found.quota else found.count

    def kind_rows(self) -> tuple[str, ...]:
        """The rows of `vfio_device_kinds` that turn the names given on the node into those of the guest."""
        rows = self.device.items()
        return tuple(f"{VENDOR}/{name}={each.kind}{f':{each.model}' if each.model else ''}" for name, each in rows)


def read_instances(content: bytes, path: str) -> InstanceTable:
    """The table in the file. Raises InvalidArgument naming file and entry."""
    doing = f"read instance types '{path}'"
    if len(content) > MAX_BYTES:
        raise InvalidArgument(f"{doing}: more than {MAX_BYTES} bytes")
    table = from_toml(content, InstanceTable, lambda problem: InvalidArgument(f"{doing}: {problem}"))
    for fault in _faults(table):
        raise InvalidArgument(f"{doing}: {fault}")
    return table


def _faults(table: InstanceTable) -> Iterable[str]:
    for name, times in Counter(each.name for each in table.type).items():
        if times > 1:
            yield f"type {name!r} is there twice"
    for each in table.type:
        if each.device not in table.device:
            yield f"type {each.name!r}: device {each.device!r} is not described"
        if min(each.vcpus, each.memory_mib, each.devices) < 1:
            yield f"type {each.name!r}: vcpus, memory_mib and devices are 1 or more"
        if not each.name:
            yield "a type has no name"
        if each.price and _price(each) is None:
            yield f"type {each.name!r}: price {each.price[:40]!r} is not a number of 0 or more"
    for name, quota in table.quota.items():
        if not _WORD.fullmatch(name) or quota.units < 1:
            yield f"quota {name[:100]!r}: its name is a DNS label of at most 40 characters, and units are 1 or more"
    for name, product in table.device.items():
        yield from (f"device {name[:100]!r}: {fault}" for fault in _product_faults(name, product, table))


def _product_faults(name: str, product: Product, table: InstanceTable) -> Iterable[str]:
    if not _WORD.fullmatch(name):
        yield "its name is a DNS label of at most 40 characters that begins with a letter"
    if product.kind.count("/") != 1 or "=" in product.kind:
        yield f"kind {product.kind[:100]!r} is not VENDOR/CLASS"
    if not any(each.device == name for each in table.type):
        yield "no type has it"
    if min(product.count, product.units, product.memory_mib) < 0:
        yield "count, units and memory_mib are 0 or more"
    if not product.quota:
        if product.units or not product.count:
            yield "count is 1 or more, or there is a quota with units"
    elif product.quota not in table.quota:
        yield f"quota {product.quota!r} is not described"
    elif product.count or product.units < 1:
        yield "with a quota, units are 1 or more and there is no count"
    if not product.quota and product.count > MOST_OFFERED:
        yield f"count is more than {MOST_OFFERED}"
    if product.quota in table.quota and product.units > 0 and table.offered(name) > MOST_OFFERED:
        yield f"quota {product.quota!r} has units for more than {MOST_OFFERED}"


def choose_type(
    table: InstanceTable, requests: Iterable[DeviceRequest], *, vcpus: int, memory_mib: int, asked: str
) -> str:
    """The cheapest type that has the devices given to the pod, and its size; `asked` where no device is of the table.

    A type that the pod asks for has to have them. Raises FailedPrecondition naming what is missing.
    """
    wanted = _products(requests)
    if not wanted:
        return asked
    doing = f"choose instance type for {_words(wanted)}"
    if len(wanted) > 1:
        raise FailedPrecondition(f"{doing}: a type has devices of one product")
    ((product, number),) = wanted.items()
    fitting = [
        each
        for each in table.type
        if each.device == product and each.devices >= number and each.vcpus >= vcpus and each.memory_mib >= memory_mib
    ]
    if asked:
        if asked not in {each.name for each in fitting}:
            raise FailedPrecondition(f"{doing}: machine_type '{asked}' has not all of it, or is not in the table")
        return asked
    if not fitting:
        raise FailedPrecondition(f"{doing} with {vcpus} vCPUs and {memory_mib} MiB: no type of the table has all of it")
    return min(fitting, key=_order).name


def _products(requests: Iterable[DeviceRequest]) -> Counter[str]:
    """How many devices of each product; one that two containers share counts once."""
    names = {each.name for each in requests if each.name.startswith(f"{VENDOR}/")}
    return Counter(name.partition("=")[0].partition("/")[2] for name in names)


def _words(wanted: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {product}" for product, number in sorted(wanted.items()))


def _order(each: InstanceType) -> tuple[object, ...]:
    price = _price(each)
    return (price is None, price or 0, each.devices, each.memory_mib, each.vcpus, each.name)


def _price(each: InstanceType) -> Decimal | None:
    """None without a price, or if the text is not a number of 0 or more."""
    try:
        price = Decimal(each.price)
    except InvalidOperation:
        return None
    return price if price.is_finite() and price >= 0 else None
