"""The table of instance types: what is refused, what is offered, and the type that is chosen."""

import pytest

from pyshim.model.devices import DeviceRequest
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.resources.devices.plan.instances import MAX_BYTES, InstanceTable, choose_type, read_instances

TABLE = """
[[type]]
name = "p5.4xlarge"
vcpus = 16
memory_mib = 262144
price = "6.88"
device = "h100"
devices = 1

[[type]]
name = "p5.48xlarge"
vcpus = 192
memory_mib = 2097152
price = "55.04"
device = "h100"
devices = 8

[[type]]
name = "nv6"
vcpus = 6
memory_mib = 56320
device = "a10-sixth"
devices = 1

[device.h100]
kind = "nvidia.com/gpu"
model = "H100"
memory_mib = 81920
attributes = { architecture = "Hopper", mig = true, slices = 7 }
count = 9

[device.a10-sixth]
kind = "nvidia.com/gpu"
memory_mib = 4096
quota = "a10"
units = 6

[quota.a10]
units = 20
"""


def table(text: str = TABLE) -> InstanceTable:
    return read_instances(text.encode(), "/etc/t.toml")


def given(*names: str) -> list[DeviceRequest]:
    return [DeviceRequest(name=name, origin="claim ns/c", container="a") for name in names]


def test_as_many_devices_are_offered_as_the_count_or_the_units_of_the_quota_allow() -> None:
    assert (table().offered("h100"), table().offered("a10-sixth")) == (9, 3)


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ("[[type]]", "[[typo]]", "unknown field `typo`"),
        ('"nv6"', '"p5.4xlarge"', "type 'p5.4xlarge' is there twice"),
        ('"nv6"', '""', "a type has no name"),
        ("devices = 8", "devices = 0", "vcpus, memory_mib and devices are 1 or more"),
        ("devices = 8", "devices = '8'", "is not a whole number"),
        ('"55.04"', '"-1"', "price '-1' is not a number"),
        ('"55.04"', '"NaN"', "price 'NaN' is not a number"),
        ('device = "h100"', 'device = "h200"', "device 'h200' is not described"),
        ("[device.h100]", '[device."H 100"]', "is not described"),
        ('kind = "nvidia.com/gpu"\nmodel', 'kind = "gpu"\nmodel', "kind 'gpu' is not VENDOR/CLASS"),
        ("count = 9", "count = -1", "count, units and memory_mib are 0 or more"),
        ("count = 9", "count = 9999", "count is more than 4096"),
        ("count = 9", "", "count is 1 or more, or there is a quota"),
        ("units = 6", "units = 0", "with a quota, units are 1 or more"),
        ('quota = "a10"', 'quota = "b20"', "quota 'b20' is not described"),
        ("units = 20", "units = -5", "units are 1 or more"),
        ("units = 20", "units = 99999999", "units for more than 4096"),
        ('device = "a10-sixth"', 'device = "h100"', "device 'a10-sixth': no type has it"),
        ("[device", "[device\x00", "read instance types '/etc/t.toml'"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused_by_its_entry(before: str, after: str, cause: str) -> None:
    assert before in TABLE
    with pytest.raises(InvalidArgument, match=r"read instance types '/etc/t\.toml': ") as caught:
        table(TABLE.replace(before, after, 1))
    assert cause in str(caught.value)


def test_a_table_that_is_too_large_is_not_parsed() -> None:
    with pytest.raises(InvalidArgument, match=f"read instance types '/t': more than {MAX_BYTES} bytes"):
        read_instances(b"#" * (MAX_BYTES + 1), "/t")


@pytest.mark.parametrize(
    ("names", "vcpus", "memory_mib", "asked", "chosen"),
    [
        ((), 1, 512, "", ""),
        ((), 1, 512, "m5.large", "m5.large"),
        (("nvidia.com/gpu=GPU-1",), 1, 512, "", ""),
        (("pyshim.io/h100=h100-0",), 1, 512, "", "p5.4xlarge"),
        (("pyshim.io/h100=h100-0", "pyshim.io/h100=h100-0"), 1, 512, "", "p5.4xlarge"),
        (("pyshim.io/h100=h100-0", "pyshim.io/h100=h100-1"), 1, 512, "", "p5.48xlarge"),
        (("pyshim.io/h100=h100-0",), 16, 262144, "", "p5.4xlarge"),
        (("pyshim.io/h100=h100-0",), 17, 512, "", "p5.48xlarge"),
        (("pyshim.io/h100=h100-0",), 1, 262145, "", "p5.48xlarge"),
        (("pyshim.io/h100=h100-0",), 1, 512, "p5.48xlarge", "p5.48xlarge"),
        (("pyshim.io/a10-sixth=a10-sixth-2",), 6, 512, "", "nv6"),
    ],
)
def test_the_cheapest_type_with_devices_and_size_is_chosen(
    names: tuple[str, ...], vcpus: int, memory_mib: int, asked: str, chosen: str
) -> None:
    assert choose_type(table(), given(*names), vcpus=vcpus, memory_mib=memory_mib, asked=asked) == chosen


@pytest.mark.parametrize(
    ("names", "vcpus", "asked", "cause"),
    [
        (("pyshim.io/h100=h100-0", "pyshim.io/a10-sixth=a10-sixth-0"), 1, "", "a type has devices of one product"),
        (tuple(f"pyshim.io/h100=h100-{number}" for number in range(9)), 1, "", "9 h100 with 1 vCPUs and 512 MiB"),
        (("pyshim.io/h100=h100-0",), 193, "", "no type of the table has all of it"),
        (("pyshim.io/h100=h100-0",), 1, "nv6", "machine_type 'nv6' has not all of it"),
        (("pyshim.io/h100=h100-0",), 17, "p5.4xlarge", "machine_type 'p5.4xlarge' has not all of it"),
        (("pyshim.io/l40=l40-0",), 1, "", "1 l40"),
    ],
)
def test_what_no_type_has_is_refused_by_name(names: tuple[str, ...], vcpus: int, asked: str, cause: str) -> None:
    with pytest.raises(FailedPrecondition, match="choose instance type for") as caught:
        choose_type(table(), given(*names), vcpus=vcpus, memory_mib=512, asked=asked)
    assert cause in str(caught.value)
