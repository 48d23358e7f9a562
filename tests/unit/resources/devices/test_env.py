"""Variables of a device's spec: what they name on the host, they name in the guest, or they are not there."""

import pytest

from pyshim.model.devices import HostFunction, VfioNode
from pyshim.resources.devices.plan.devices import Passed
from pyshim.resources.devices.plan.env import guest_env

HOST = "0000:65:00.0"
UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


def passed(path: str, address: str) -> Passed:
    function = HostFunction(address=address, vendor="0x10de", device="0x2331", class_code="0x030200")
    return Passed(node=VfioNode(path=path, functions=(function,)), pci_paths={address: "1c/00"}, host_kind="")


OWN = [passed("/dev/vfio/12", HOST), passed("/dev/vfio/13", "0000:66:00.0")]
NAMES = {
    "/dev/vfio/12": ("nvidia.com/gpu=2",),
    "/dev/vfio/13": ("nvidia.com/gpu=5",),
    "/dev/vfio/9": ("amd.com/gpu=0",),
}


@pytest.mark.parametrize(
    "text",
    [
        "PLAIN=1",
        "EMPTY=",
        "NVIDIA_VISIBLE_DEVICES=void",
        "NVIDIA_VISIBLE_DEVICES=all",
        f"NVIDIA_VISIBLE_DEVICES={UUID}",
        f"PCIDEVICE_INTEL_COM_NIC={HOST}",
        f'PCIDEVICE_INTEL_COM_NIC_INFO={{"{HOST}":{{"generic":{{"deviceID":"{HOST}"}}}}}}',
        "CUDA_VISIBLE_DEVICES=0",
        "MAC=52:54:00:12:34:56",
        "TIME=12:30.5",
        "ADDRESS=10.0.0.1:80",
        "PATH=/dev/vfio-like",
    ],
)
def test_what_means_the_same_in_the_guest_stays(text: str) -> None:
    assert guest_env([text], OWN, NAMES) == ((text,), ())


@pytest.mark.parametrize("value", ["0", "0,1", "7, 8"])
def test_indices_of_the_host_become_the_guests(value: str) -> None:
    assert guest_env([f"NVIDIA_VISIBLE_DEVICES={value}"], OWN, NAMES) == (("NVIDIA_VISIBLE_DEVICES=2,5",), ())


@pytest.mark.parametrize(
    "text",
    [
        "NODE=/dev/vfio/12",
        "NODES=/dev/vfio/devices/vfio3:/dev/vfio/12",
        f"PCI_RESOURCE_NVIDIA_COM_GH100={HOST}",
        "PCI_RESOURCE_NVIDIA_COM_GH100=0000:65:00.0,0000:66:00.0",
        "QAT0=65:01.2",
        f'INFO={{"pci":"{HOST}"}}',
        "AMD_VISIBLE_DEVICES=0",
    ],
)
def test_untranslatable_names_of_host_devices_are_left_out(text: str) -> None:
    assert guest_env(["A=1", text], OWN, NAMES) == (("A=1",), (text.partition("=")[0],))
