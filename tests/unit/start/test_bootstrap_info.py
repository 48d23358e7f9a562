import json

from protos.containerd.types_pb2 import RuntimeInfo
from pyshim import __version__
from pyshim.start.info import runtime_info
from pyshim.task.sandbox_service import SANDBOX_SERVICE
from pyshim.task.service import SERVICES


def test_runtime_info_is_containerds_message() -> None:
    info = RuntimeInfo.FromString(runtime_info())

    assert info.name == "io.containerd.pykata.v2"
    assert info.version.version == __version__
    assert info.features.type_url == "types.containerd.io/opencontainers/runtime-spec/1/features/Features"
    assert not info.HasField("options")


def test_the_services_of_a_shims_socket_are_named() -> None:
    info = RuntimeInfo.FromString(runtime_info())

    assert info.annotations["io.containerd.pykata.v2/services"].split(",") == [*SERVICES, SANDBOX_SERVICE]


def test_mounts_of_layers_are_left_to_the_shim_but_not_the_making_of_file_systems() -> None:
    info = RuntimeInfo.FromString(runtime_info())

    assert info.annotations["containerd.io/runtime-allow-mounts"] == "mkdir/*,format/*,erofs"


def test_features_offer_recursive_read_only_mounts_and_nothing_that_is_not_there() -> None:
    features = json.loads(RuntimeInfo.FromString(runtime_info()).features.value)

    assert "rro" in features["mountOptions"]
    assert features["mountOptions"] == sorted(features["mountOptions"])
    assert "linux" not in features
    assert features["ociVersionMin"] <= features["ociVersionMax"]
