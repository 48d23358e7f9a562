"""The dialect of a caller, recognized by bytes that containerd's own messages make."""

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from protos.containerd.bootstrap_pb2 import BootstrapParams, BootstrapResult, LogLevel
from protos.containerd.runc_options_pb2 import Options as RuncOptions
from protos.containerd.runtimeoptions_pb2 import Options as RuntimeOptions
from protos.containerd.types_pb2 import MountCapabilities
from pyshim.start.dialect import params_of
from pyshim.start.invocation import Invocation, parse


def call(container_id: str = "c1", namespace: str = "k8s.io") -> Invocation:
    return parse(["-namespace", namespace, "-id", container_id, "-address", "/c.sock", "start"])


def runc_options(cgroup: str, prefix: str = "") -> AnyMessage:
    return AnyMessage(
        type_url=f"{prefix}containerd.runc.v1.Options", value=RuncOptions(shim_cgroup=cgroup).SerializeToString()
    )


@pytest.mark.parametrize(
    "stdin",
    [
        b"",
        AnyMessage(
            type_url="runtimeoptions.v1.Options", value=RuntimeOptions(config_path="/etc/k.toml").SerializeToString()
        ).SerializeToString(),
        BootstrapParams(instance_id="other", namespace="k8s.io").SerializeToString(),
        BootstrapParams(instance_id="c1", namespace="other").SerializeToString(),
        BootstrapParams(instance_id="c1").SerializeToString(),
        b"\xff\xff\xff not protobuf",
    ],
    ids=["nothing", "options", "other id", "other namespace", "no namespace", "garbage"],
)
def test_everything_but_our_own_parameters_is_the_legacy_dialect(stdin: bytes) -> None:
    said = params_of(stdin, call())

    assert said.answer("unix:///run/s/abc") == b"unix:///run/s/abc"


def test_options_whose_type_and_value_equal_id_and_namespace_are_still_told_apart() -> None:
    options = AnyMessage(type_url="c1", value=b"not-the-namespace").SerializeToString()

    assert not params_of(options, call()).bootstrap


def test_parameters_that_repeat_id_and_namespace_are_the_bootstrap_dialect() -> None:
    params = BootstrapParams(
        instance_id="c1", namespace="k8s.io", containerd_ttrpc_address="/c.ttrpc", socket_dir="/run/elsewhere"
    )

    said = params_of(params.SerializeToString(), call())

    assert (said.ttrpc_address, said.socket_dir, said.debug) == ("/c.ttrpc", "/run/elsewhere", False)
    answer = BootstrapResult.FromString(said.answer("unix:///run/s/abc"))
    mounts = answer.extensions.pop().value
    assert answer == BootstrapResult(version=3, address="unix:///run/s/abc", protocol="ttrpc")
    assert mounts.type_url == "containerd.types.MountCapabilities"
    assert MountCapabilities.FromString(mounts.value) == MountCapabilities(
        types=["erofs"], transforms=["mkdir", "format"]
    )


@pytest.mark.parametrize(
    ("level", "debug"),
    [
        (LogLevel.LOG_LEVEL_TRACE, True),
        (LogLevel.LOG_LEVEL_DEBUG, True),
        (LogLevel.LOG_LEVEL_INFO, False),
        (LogLevel.LOG_LEVEL_ERROR, False),
    ],
)
def test_log_level_of_the_parameters_turns_debug_on(level: LogLevel, debug: bool) -> None:
    params = BootstrapParams(instance_id="c1", namespace="k8s.io", log_level=level)

    assert params_of(params.SerializeToString(), call()).debug is debug


@pytest.mark.parametrize("prefix", ["", "type.googleapis.com/"])
def test_shim_cgroup_is_found_in_legacy_options(prefix: str) -> None:
    assert params_of(runc_options("/shims", prefix).SerializeToString(), call()).shim_cgroup == "/shims"


def test_shim_cgroup_is_found_among_extensions() -> None:
    params = BootstrapParams(instance_id="c1", namespace="k8s.io")
    params.extensions.add().value.type_url = "something.Else"
    params.extensions.add().value.CopyFrom(runc_options("/shims"))

    assert params_of(params.SerializeToString(), call()).shim_cgroup == "/shims"


def test_options_of_another_type_name_no_cgroup() -> None:
    options = AnyMessage(type_url="some.Options", value=RuncOptions(shim_cgroup="/shims").SerializeToString())

    assert params_of(options.SerializeToString(), call()).shim_cgroup == ""


@pytest.mark.parametrize("bootstrap", [True, False], ids=["bootstrap", "legacy"])
def test_the_configuration_is_found_in_our_options(bootstrap: bool) -> None:
    options = RuntimeOptions(type_url="t", config_path="/etc/k.toml", config_body=b"[a]")
    message = AnyMessage(type_url="runtimeoptions.v1.Options", value=options.SerializeToString())
    params = BootstrapParams(instance_id="c1", namespace="k8s.io")
    params.extensions.add().value.CopyFrom(message)

    said = params_of((params if bootstrap else message).SerializeToString(), call())

    assert (said.bootstrap, said.config_path, said.config_body) == (bootstrap, "/etc/k.toml", b"[a]")
