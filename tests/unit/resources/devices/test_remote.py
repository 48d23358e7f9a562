"""Devices of a remote pod: counts, claims, each container's share, and refusals."""

import json

import pytest

from pyshim.model.config import HYPERVISOR_PREFIX
from pyshim.model.devices import DeviceRequest, FoundDevice, PodDevices
from pyshim.model.errors import FailedPrecondition, InvalidArgument, Unimplemented
from pyshim.model.guest import GuestContainer
from pyshim.resources.devices.plan.remote import CLAIMS_KEY, own_names, remote_devices, with_names

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
    found = pod(("a", "nvidia.com/pgpu=GPU-7"), ("b", "nvidia.com/gpu=x"), ("b", "nvidia.com/gpu=0"))

    remote = remote_devices(found, KINDS, gpu_model="H100")

    assert remote.annotations[f"{HYPERVISOR_PREFIX}default_gpus"] == "3"
    assert remote.annotations[f"{HYPERVISOR_PREFIX}default_gpu_model"] == "H100"
    assert json.loads(remote.annotations[CLAIMS_KEY]) == [
        {"container": "a", "device": "nvidia.com/pgpu=GPU-7", "origin": "claim ns/x"},
        {"container": "b", "device": "nvidia.com/gpu=x", "origin": "claim ns/x"},
        {"container": "b", "device": "nvidia.com/gpu=0", "origin": "claim ns/x"},
    ]
    assert [own_names(found, remote.names, each, PodDevices()) for each in ("a", "b", "c", "")] == [
        ("nvidia.com/gpu=0",),
        ("nvidia.com/gpu=1", "nvidia.com/gpu=2"),
        (),
        (),
    ]


def test_a_shared_claim_is_one_device() -> None:
    found = pod(("a", "nvidia.com/gpu=x"), ("b", "nvidia.com/gpu=x"))
    remote = remote_devices(found, KINDS)

    assert remote.annotations[f"{HYPERVISOR_PREFIX}default_gpus"] == "1"
    assert [own_names(found, remote.names, each, PodDevices()) for each in "ab"] == [("nvidia.com/gpu=0",)] * 2


def test_what_a_containers_annotations_ask_for_must_be_the_vms() -> None:
    found = pod(("", "nvidia.com/gpu=x"), ("a", "nvidia.com/gpu=y"))
    names = remote_devices(found, KINDS).names

    assert own_names(found, names, "a", pod(("", "nvidia.com/gpu=y"), ("", "nvidia.com/gpu=x"))) == (
        "nvidia.com/gpu=1",
        "nvidia.com/gpu=0",
    )
    with pytest.raises(FailedPrecondition, match=r"'nvidia\.com/gpu=z', 'v\.com/x=0': the vm was made without"):
        own_names(found, names, "a", pod(("", "nvidia.com/gpu=z"), ("", "nvidia.com/gpu=x"), ("", "v.com/x=0")))


def test_all_gpus_of_the_guest_say_nothing_of_their_number() -> None:
    remote = remote_devices(pod(("", "nvidia.com/pgpu=all")), KINDS, gpus=2)

    assert remote.annotations[f"{HYPERVISOR_PREFIX}default_gpus"] == "2"
    assert remote.names == {"nvidia.com/pgpu=all": "nvidia.com/gpu=all"}


def test_without_devices_the_pods_own_wish_counts() -> None:
    remote = remote_devices(PodDevices(), KINDS, gpus=2, gpu_model="A100")

    assert remote.annotations == {
        f"{HYPERVISOR_PREFIX}default_gpus": "2",
        f"{HYPERVISOR_PREFIX}default_gpu_model": "A100",
        CLAIMS_KEY: "",
    }
    assert remote.names == {}
    assert remote_devices(PodDevices(), KINDS).annotations[f"{HYPERVISOR_PREFIX}default_gpus"] == "0"


def test_more_may_be_wished_than_was_given_but_not_less() -> None:
    two = pod(("a", "nvidia.com/gpu=0"), ("a", "nvidia.com/gpu=1"))

    assert remote_devices(two, KINDS, gpus=4).annotations[f"{HYPERVISOR_PREFIX}default_gpus"] == "4"
    with pytest.raises(InvalidArgument, match="1, and the pod was given 2 GPUs"):
        remote_devices(two, KINDS, gpus=1)


def test_devices_no_remote_guest_can_have_are_all_named() -> None:
    found = pod(("a", "nvidia.com/gpu=0"), ("a", "mellanox.com/nic=1"), ("b", "v.com/fpga=2"))

    with pytest.raises(Unimplemented, match=r"'mellanox\.com/nic=1' by claim ns/x, 'v\.com/fpga=2' by claim ns/x"):
        remote_devices(found, KINDS)


def test_the_model_is_what_the_table_says_unless_the_pod_says() -> None:
    kinds = (*KINDS, "nvidia.com/GH100=nvidia.com/gpu:H100", "nvidia.com/GA100=nvidia.com/gpu:A100")
    two = pod(("a", "nvidia.com/GH100=0"), ("b", "nvidia.com/GH100=1"))
    mixed = pod(("a", "nvidia.com/GH100=0"), ("b", "nvidia.com/GA100=0"))

    def model(found: PodDevices, asked: str = "") -> str:
        return remote_devices(found, kinds, gpu_model=asked).annotations[f"{HYPERVISOR_PREFIX}default_gpu_model"]

    assert (model(two), model(two, "H200"), model(pod(("a", "nvidia.com/gpu=0")))) == ("H100", "H200", "")
    with pytest.raises(InvalidArgument, match="A100, H100: an instance has GPUs of one model"):
        model(mixed)


def test_gpus_of_two_vendors_are_on_no_instance() -> None:
    with pytest.raises(InvalidArgument, match=r"amd\.com/gpu, nvidia\.com/gpu: an instance has GPUs of one vendor"):
        remote_devices(pod(("a", "nvidia.com/gpu=0"), ("b", "amd.com/gpu=0")), KINDS)


def test_inner_names_join_the_annotations_there_are() -> None:
    guest = GuestContainer(
        container_id="c", spec={"annotations": {"a": "b"}}, storages=(), devices=(), shared_pid_namespace=False
    )

    given = with_names(guest, ("nvidia.com/gpu=1", "nvidia.com/gpu=0"))

    assert given.spec["annotations"] == {
        "a": "b",
        "cdi.k8s.io/device0": "nvidia.com/gpu=1",
        "cdi.k8s.io/device1": "nvidia.com/gpu=0",
    }
    assert guest.spec["annotations"] == {"a": "b"}
    assert with_names(guest, ()) is guest
