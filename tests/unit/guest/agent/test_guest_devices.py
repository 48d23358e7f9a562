"""Devices in the guest: by name through its own CDI specs, and PCI functions passed through. Real crun on this host."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent, inside, unused_id
from oci_messages import a_spec

from guest.agent import links
from guest.agent.container import cdi
from guest.agent.container.cdi import expanded, parse_visible
from guest.agent.container.named_devices import NamedDevices
from guest.agent.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from guest.agent.settings import parse
from guest.agent.storage import devices
from guest.agent.storage.devices import bind_function, full_address, functions_of, rewrite_env
from guest.agent.storage.hotplug import Hotplug
from protos.agent import agent_pb2, oci_pb2
from pyshim.cdi import Cache, ContainerEdits, InvalidName
from pyshim.ttrpc import Code

DEVICE = {"name": "0", "containerEdits": {"env": ["A=1"]}}


def put_spec(agent: HostedAgent, kind: str, devices: dict[str, dict[str, Any]], name: str = "") -> None:
    """The guest has a CDI spec, whole from the first moment."""
    directory = inside(agent, "/run/cdi")
    directory.mkdir(exist_ok=True)
    document = {
        "cdiVersion": "0.6.0",
        "kind": kind,
        "devices": [{"name": device, "containerEdits": edits} for device, edits in devices.items()],
    }
    scratch = directory / ".new"
    scratch.write_text(json.dumps(document))
    scratch.rename(directory / f"{name or kind.replace('/', '-')}.json")


def asking(agent: HostedAgent, script: str, value: str, *env: str) -> oci_pb2.Spec:
    spec = agent.spec(["sh", "-c", script], Env=["PATH=/bin", *env])
    if value:
        spec.Annotations["cdi.k8s.io/vfio3"] = value
    return spec


@pytest.mark.root
def test_a_container_gets_what_the_guests_spec_says(hosted_agent: HostedAgent, client: AgentClient) -> None:
    cid = unused_id()
    node = {"path": "/dev/toy", "hostPath": "/dev/zero"}
    mount = {"hostPath": str(hosted_agent.root / "etc"), "containerPath": "/given/etc", "options": ["ro", "bind"]}
    put_spec(hosted_agent, "toy.org/a", {"0": {"env": ["TOY=0"], "deviceNodes": [node], "mounts": [mount]}})

    client.create(
        asking(hosted_agent, "echo $TOY; head -c 2 /dev/toy | wc -c; cat /given/etc/group", "toy.org/a=0"), cid
    )
    client.start(cid)

    assert client.read_all(cid) == b"0\n2\nroot:x:0:\nappgroup:x:4321:\nextra:x:555:\n"
    client.remove(cid)


@pytest.mark.root
def test_two_containers_have_disjoint_devices(hosted_agent: HostedAgent, client: AgentClient) -> None:
    put_spec(hosted_agent, "toy.org/pair", {str(n): {"env": [f"TOY_{n}=1"]} for n in range(2)})
    seen = []
    for index in range(2):
        cid = unused_id()
        client.run(asking(hosted_agent, "env", f"toy.org/pair={index}"), cid)
        seen.append([line for line in client.read_all(cid).decode().split() if line.startswith("TOY_")])
        client.remove(cid)

    assert seen == [["TOY_0=1"], ["TOY_1=1"]]


@pytest.mark.root
def test_a_spec_that_comes_late_is_waited_for(hosted_agent: HostedAgent, client: AgentClient) -> None:
    cid = unused_id()
    pending = threading.Timer(0.6, put_spec, (hosted_agent, "late.org/a", {"0": {"env": ["LATE=yes"]}}))
    pending.start()
    try:
        client.create(asking(hosted_agent, "echo $LATE", "late.org/a=0"), cid)
    finally:
        pending.join()
    client.start(cid)

    assert client.read_all(cid) == b"yes\n"
    client.remove(cid)


@pytest.mark.root
def test_a_kind_that_is_there_without_the_device_is_an_error_at_once(
    hosted_agent: HostedAgent, client: AgentClient
) -> None:
    put_spec(hosted_agent, "here.org/a", {"0": {"env": ["A=1"]}})
    with pytest.raises(CallError, match=r"no spec defines 'here\.org/a=7', 'nowhere\.org/a=1'") as refused:
        client.create(asking(hosted_agent, "true", "here.org/a=0,here.org/a=7,nowhere.org/a=1"), unused_id())

    assert refused.value.code == Code.FAILED_PRECONDITION, "not DeadlineExceeded"


@pytest.mark.root
def test_an_annotation_that_is_none_names_its_key(hosted_agent: HostedAgent, client: AgentClient) -> None:
    with pytest.raises(CallError, match=r"read cdi annotation 'cdi\.k8s\.io/vfio3'") as refused:
        client.create(asking(hosted_agent, "true", "gpu"), unused_id())

    assert refused.value.code == Code.INVALID_ARGUMENT


@pytest.mark.root
def test_the_pause_container_gets_no_devices(hosted_agent: HostedAgent, client: AgentClient) -> None:
    cid = unused_id()
    spec = asking(hosted_agent, "echo ok", "nowhere.org/a=0")
    spec.Annotations["io.katacontainers.pkg.oci.container_type"] = "pod_sandbox"

    client.run(spec, cid)

    assert client.read_all(cid) == b"ok\n"
    client.remove(cid)


@pytest.mark.root
def test_a_node_that_the_guest_does_not_have_leaves_no_container(
    hosted_agent: HostedAgent, client: AgentClient
) -> None:
    cid = unused_id()
    put_spec(hosted_agent, "gone.org/a", {"0": {"deviceNodes": [{"path": "/dev/nvidia0"}]}})

    with pytest.raises(CallError, match="look at device node '/dev/nvidia0': ENOENT") as refused:
        client.create(asking(hosted_agent, "true", "gone.org/a=0"), cid)

    assert refused.value.code == Code.FAILED_PRECONDITION
    client.create(asking(hosted_agent, "true", ""), cid)
    client.remove(cid)


@pytest.mark.usefixtures("fast_clock")
async def test_a_spec_that_comes_between_two_looks_is_found_by_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing devices and present kinds must come from one look: a driver may write its spec at any instant."""

    class Overtaken(Cache):
        def edits(self, names: Iterable[str]) -> ContainerEdits:
            try:
                return super().edits(names)
            finally:
                document = {"cdiVersion": "0.6.0", "kind": "v.org/a", "devices": [DEVICE]}
                (tmp_path / "v.json").write_text(json.dumps(document))

    monkeypatch.setattr(cdi, "Cache", Overtaken)
    monkeypatch.setattr(cdi, "DIRECTORIES", (str(tmp_path),))
    spec = oci_pb2.Spec(Annotations={"cdi.k8s.io/vfio1": "v.org/a=0"})

    edits = await NamedDevices(timeout_s=100, reads_environment=False).wait_for_edits("c1", spec)

    assert edits.env == ("A=1",)


@pytest.mark.usefixtures("fast_clock")
async def test_a_kind_that_never_comes_is_given_up() -> None:
    spec = oci_pb2.Spec(Annotations={"cdi.k8s.io/vfio1": "never.org/a=0,never.org/a=1"})

    with pytest.raises(DeadlineExceeded) as caught:
        await NamedDevices(timeout_s=100, reads_environment=False).wait_for_edits("c1", spec)

    missing = "container 'c1': resolve cdi devices: no spec defines 'never.org/a=0', 'never.org/a=1', after 100 s"
    assert missing in str(caught.value)


@pytest.mark.parametrize(("reads", "expected"), [(True, "v/gpu=1"), (False, "")])
def test_a_container_chooses_by_its_environment_where_it_may(reads: bool, expected: str) -> None:
    env = ["VISIBLE_CDI_DEVICES=v/gpu=0", "A=b", "VISIBLE_CDI_DEVICES=v/gpu=1", "VISIBLE_CDI_DEVICES_X=no"]
    spec = oci_pb2.Spec(Process=oci_pb2.Process(Env=env))
    named = NamedDevices(timeout_s=1, reads_environment=reads)

    assert (named._visible(spec), named.are_asked_for(spec)) == (expected, reads)


# Settings and pure parts


def test_settings_of_cdi_are_read_from_the_command_line() -> None:
    settings = parse(["agent.cdi_timeout=7", "agent.visible_cdi_devices=true"])

    assert (settings.cdi_timeout_s, settings.visible_cdi_devices) == (7, True)
    assert (parse([]).cdi_timeout_s, parse([]).visible_cdi_devices) == (100, False)
    assert parse(["agent.cdi_timeout=soon"]).problems == ["agent.cdi_timeout=soon"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("v/gpu=0,2", ["v/gpu=0", "v/gpu=2"]),
        ("v/gpu=all", ["v/gpu=0", "v/gpu=2"]),
        ("v/nic=all", ["v/nic=all"]),
        ("w/x=all", ["w/x=all"]),
        ("v/gpu=0:v/nic=1", ["v/gpu=0", "v/nic=1"]),
        ("", []),
    ],
)
def test_visible_devices_are_names(text: str, names: list[str], tmp_path: Path) -> None:
    for kind, names_of_kind in (("v/gpu", ("0", "2")), ("v/nic", ("1", "all"))):
        found = [{"name": name, "containerEdits": {"env": ["A=1"]}} for name in names_of_kind]
        document = {"cdiVersion": "0.5.0", "kind": kind, "devices": found}
        (tmp_path / f"{kind[2:]}.json").write_text(json.dumps(document))

    assert expanded(parse_visible(text), Cache([str(tmp_path)])) == names


@pytest.mark.parametrize("text", ["v/gpu", "gpu=0", "v/gpu=", "v/gpu=0,", "v/gpu=0::v/gpu=1", "v/gpu=-1", "v/gpu=é"])
def test_visible_devices_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidName, match="read VISIBLE_CDI_DEVICES: entry"):
        parse_visible(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:65:00.0", "0000:65:00.0"),
        ("65:00.1", "0000:65:00.1"),
        ("0001:AB:1f.7", "0001:ab:1f.7"),
        ("00010000:ab:1f.7", "00010000:ab:1f.7"),
    ],
)
def test_addresses_have_their_domain(text: str, address: str) -> None:
    assert full_address(text) == address


@pytest.mark.parametrize("text", ["", "65", "65:00", "65:00.0.0", "x:65:00.0", "0000:65:0g.0", "0000:6:00.0", "::."])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="PCI address"):
        full_address(text)


ADDRESSES = {"0000:65:00.0": "0000:01:00.0", "0000:66:00.1": "0000:02:00.0"}


@pytest.mark.parametrize(
    ("env", "rewritten"),
    [
        ("PCIDEVICE_V_GPU=0000:65:00.0", "PCIDEVICE_V_GPU=0000:01:00.0"),
        ("PCIDEVICE_V_GPU=0000:66:00.1,65:00.0", "PCIDEVICE_V_GPU=0000:02:00.0,0000:01:00.0"),
        ('PCIDEVICE_V_INFO={"0000:65:00.0":{"x":1}}', 'PCIDEVICE_V_INFO={"0000:01:00.0":{"x":1}}'),
        ("PCIDEVICE_V=", "PCIDEVICE_V="),
        ("OTHER=0000:65:00.0", "OTHER=0000:65:00.0"),
        ("PCIDEVICE_NOVALUE", "PCIDEVICE_NOVALUE"),
    ],
)
def test_variables_name_the_guests_addresses(env: str, rewritten: str) -> None:
    assert rewrite_env(["A=b", env], ADDRESSES) == ["A=b", rewritten]


def test_a_variable_with_an_address_that_was_not_passed_through() -> None:
    with pytest.raises(InvalidArgument, match=r"rewrite variable 'PCIDEVICE_X': host address '0000:99:00\.0'"):
        rewrite_env(["PCIDEVICE_X=0000:99:00.0"], ADDRESSES)
    assert rewrite_env(["PCIDEVICE_X=0000:99:00.0"], {}) == ["PCIDEVICE_X=0000:99:00.0"]


def test_the_functions_of_a_device_message() -> None:
    device = agent_pb2.Device(container_path="/dev/vfio/7", options=["65:00.0=1d/00", "0000:65:00.1=1e/00"])

    assert functions_of(device) == [("0000:65:00.0", "1d/00"), ("0000:65:00.1", "1e/00")]


def fake_function(sys: Path, address: str, *, driver: str = "", group: str = "") -> Path:
    folder = sys / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    (sys / "bus/pci/drivers_probe").touch()
    (folder / "driver_override").touch()
    if driver:
        (sys / "bus/pci/drivers" / driver).mkdir(parents=True)
        (sys / "bus/pci/drivers" / driver / "unbind").touch()
        (folder / "driver").symlink_to(sys / "bus/pci/drivers" / driver)
    if group:
        (sys / "kernel/iommu_groups" / group).mkdir(parents=True)
        (folder / "iommu_group").symlink_to(sys / "kernel/iommu_groups" / group)
    return folder


@pytest.mark.parametrize(
    ("driver", "written"), [("", ("vfio-pci", "", "a")), ("nvidia", ("vfio-pci", "a", "a")), ("vfio-pci", ("", "", ""))]
)
def test_a_function_is_given_to_vfio_pci(driver: str, written: tuple[str, str, str], tmp_path: Path) -> None:
    folder = fake_function(tmp_path, "a", driver=driver, group="12")

    assert bind_function(str(tmp_path), "a") == "12"

    unbound = (folder / "driver/unbind").read_text() if driver else ""
    probed = (tmp_path / "bus/pci/drivers_probe").read_text()
    assert ((folder / "driver_override").read_text(), unbound, probed) == written


def test_a_function_without_a_group_is_not_bound(tmp_path: Path) -> None:
    fake_function(tmp_path, "a")

    with pytest.raises(FailedPrecondition, match="bind a to vfio-pci: it is in no IOMMU group"):
        bind_function(str(tmp_path), "a")
    assert os.listdir(tmp_path / "bus/pci") != []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("02", ("00", ["02.0"])),
        ("02/01", ("00", ["02.0", "01.0"])),
        ("1f.7", ("00", ["1f.7"])),
        ("02/00/01", ("00", ["02.0", "00.0", "01.0"])),
        ("20/00/02", ("20", ["00.0", "02.0"])),
    ],
)
def test_pci_paths_are_read(path: str, expected: tuple[str, list[str]]) -> None:
    assert devices.pci_slots(path) == expected


@pytest.mark.parametrize("path", ["", "/", "20", "02/", "zz", "02.8", "02.", "../02", "+2", "02/0x1"])
def test_a_pci_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgument, match="PCI path"):
        devices.pci_slots(path)


def test_a_function_behind_a_bridge_is_found_by_its_secondary_bus(tmp_path: Path) -> None:
    function = tmp_path / "devices/pci0000:00/0000:00:02.0/0000:05:01.0"
    function.mkdir(parents=True)
    (tmp_path / "devices/pci0000:00/0000:00:02.0/pci_bus/0000:05").mkdir(parents=True)

    assert devices.pci_folder(str(tmp_path), "02/01") == str(function)
    assert devices.pci_folder(str(tmp_path), "02/02") is None
    assert devices.pci_folder(str(tmp_path), "03/01") is None


@pytest.mark.usefixtures("fast_clock")
async def test_a_scsi_disk_is_looked_for_by_a_controller_that_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "SYS", str(tmp_path))
    monkeypatch.setattr(devices, "is_block", lambda _path: True)
    waiting = asyncio.create_task(devices.find_block_device(Hotplug(3.0), "scsi", "0:5"))
    await asyncio.sleep(0.5)
    scan = tmp_path / "class/scsi_host/host2/scan"
    scan.parent.mkdir(parents=True)
    await asyncio.sleep(0.3)  # the kernel makes the host's directory first and its attributes later
    assert not waiting.done()
    scan.touch()

    await asyncio.sleep(0.5)
    assert scan.read_text() == "0 0 5"
    (tmp_path / "class/scsi_device/2:0:0:5/device/block/sdb").mkdir(parents=True)

    assert await waiting == "/dev/sdb"


def test_an_interface_is_found_under_its_virtio_device(tmp_path: Path) -> None:
    (tmp_path / "virtio3/net/eth7").mkdir(parents=True)

    assert links.interface_of(str(tmp_path)) == "eth7"
    assert links.interface_of(str(tmp_path / "none")) is None


def test_device_numbers_and_their_cgroup_rules_change_together() -> None:
    message = a_spec(
        Devices=[oci_pb2.LinuxDevice(Path="/dev/x", Type="b", Major=8, Minor=1)],
        Resources=oci_pb2.LinuxResources(
            Devices=[
                oci_pb2.LinuxDeviceCgroup(Allow=True, Type="b", Major=8, Minor=1),
                oci_pb2.LinuxDeviceCgroup(Allow=True, Type="c", Major=8, Minor=1),
            ]
        ),
    )

    devices.update_spec(message, {"/dev/x": ("b", 254, 16)})

    assert (message.Linux.Devices[0].Major, message.Linux.Devices[0].Minor) == (254, 16)
    assert [(one.Type, one.Major, one.Minor) for one in message.Linux.Resources.Devices] == [
        ("b", 254, 16),
        ("c", 8, 1),
    ]


def test_a_device_the_spec_does_not_have_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'/dev/y'"):
        devices.update_spec(a_spec(), {"/dev/y": ("b", 1, 1)})


@pytest.mark.root
def test_only_the_guests_own_nodes_among_mounts_get_a_rule(tmp_path: Path) -> None:
    """A container may have made the node in its volume that another one mounts."""
    made = tmp_path / "mem"
    os.mknod(made, 0o600 | stat.S_IFCHR, os.makedev(1, 1))
    mounts = [oci_pb2.Mount(source=source) for source in ("/dev/full", "/dev", "proc", "/dev/no-such", str(made))]

    assert list(devices.nodes_of(mounts)) == [("c", 1, 7)]
