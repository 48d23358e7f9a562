"""Devices of a pod elsewhere: counts, claims, each container's share, and what cannot be had there."""

import json

import pytest

from pyshim.model.devices import DeviceRequest, FoundDevice, PodDevices
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.plan.remote_devices import CLAIMS_KEY, PREFIX, remote_devices

KINDS = ("nvidia.com/pgpu=nvidia.com/gpu", "10de:03=nvidia.com/gpu")


def pod(*devices: tuple[str, str]) -> PodDevices:
    """(container, name) of each."""
    return PodDevices(
        devices=tuple(
            FoundDevice(request=DeviceRequest(name=name, origin="claim ns/x", container=container), nodes=())
            for container, name in devices
        )
    )


def test_each_container_has_its_share_and_the_instance_its_sum() -> None:
    remote = remote_devices(
        pod(("a", "nvidia.com/pgpu=GPU-7"), ("b", "nvidia.com/gpu=x"), ("b", "amd.com/gpu=0")), KINDS, gpu_model="H100"
    )

    assert remote.annotations[f"{PREFIX}default_gpus"] == "3"
    assert remote.annotations[f"{PREFIX}default_gpu_model"] == "H100"
    assert json.loads(remote.annotations[CLAIMS_KEY]) == [
        {"container": "a", "device": "nvidia.com/pgpu=GPU-7", "origin": "claim ns/x"},
        {"container": "b", "device": "nvidia.com/gpu=x", "origin": "claim ns/x"},
        {"container": "b", "device": "amd.com/gpu=0", "origin": "claim ns/x"},
    ]
    assert remote.inner == {
        "a": {"cdi.k8s.io/device0": "nvidia.com/gpu=0"},
        "b": {"cdi.k8s.io/device1": "nvidia.com/gpu=1", "cdi.k8s.io/device2": "amd.com/gpu=0"},
    }


def test_a_shared_claim_is_one_device() -> None:
    remote = remote_devices(pod(("a", "nvidia.com/gpu=x"), ("b", "nvidia.com/gpu=x")), KINDS)

    assert remote.annotations[f"{PREFIX}default_gpus"] == "1"
    assert remote.inner["a"] == remote.inner["b"] == {"cdi.k8s.io/device0": "nvidia.com/gpu=0"}


def test_without_devices_the_pods_own_wish_counts() -> None:
    remote = remote_devices(PodDevices(), KINDS, gpus=2, gpu_model="A100")

    assert remote.annotations == {f"{PREFIX}default_gpus": "2", f"{PREFIX}default_gpu_model": "A100", CLAIMS_KEY: ""}
    assert remote.inner == {}
    assert remote_devices(PodDevices(), KINDS).annotations[f"{PREFIX}default_gpus"] == "0"


def test_more_may_be_wished_than_was_given_but_not_less() -> None:
    two = pod(("a", "nvidia.com/gpu=0"), ("a", "nvidia.com/gpu=1"))

    assert remote_devices(two, KINDS, gpus=4).annotations[f"{PREFIX}default_gpus"] == "4"
    with pytest.raises(InvalidArgument, match="1, and the pod was given 2 GPUs"):
        remote_devices(two, KINDS, gpus=1)


def test_devices_no_remote_guest_can_have_are_all_named() -> None:
    found = pod(("a", "nvidia.com/gpu=0"), ("a", "mellanox.com/nic=1"), ("b", "v.com/fpga=2"))

    with pytest.raises(Unimplemented, match=r"'mellanox\.com/nic=1' by claim ns/x, 'v\.com/fpga=2' by claim ns/x"):
        remote_devices(found, KINDS)
