"""Finding, reading and refusing configuration files."""

import os
from fractions import Fraction
from pathlib import Path

import pytest

from pyshim.config.effective import examine
from pyshim.config.load import build_config, load_config, warnings
from pyshim.config.sources import SHIPPED_PATH, read_source
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError
from pyshim.model.task import RuntimeOptions

from .documents import options, write


def read(path: Path) -> Config:
    return build_config(read_source(options(path), {}))


def test_the_shipped_file_is_complete_and_every_key_of_it_has_an_effect() -> None:
    source = read_source(None, {}, (SHIPPED_PATH,))

    assert warnings(examine(source)) == ()
    config = build_config(source)
    assert os.path.basename(config.hypervisor.kernel).startswith("vmlinu")
    assert os.path.isabs(config.hypervisor.kernel)


def test_fractions_are_exact(tmp_path: Path) -> None:
    config = read(write(tmp_path / "c.toml", "[hypervisor.qemu]\ndefault_vcpus = 0.1\n"))

    assert config.hypervisor.default_vcpus == Fraction(1, 10)


def test_drop_ins_are_merged_in_name_order_and_only_toml_counts(tmp_path: Path) -> None:
    main = write(tmp_path / "c.toml", "[hypervisor.qemu]\ndefault_memory = 512\ndefault_bridges = 2\n")
    write(tmp_path / "config.d/20-b.toml", "[hypervisor.qemu]\ndefault_memory = 1024\n")
    target = write(tmp_path / "elsewhere/x", "[hypervisor.qemu]\ndefault_memory = 768\n")
    (tmp_path / "config.d/10-a.toml").symlink_to(target)
    write(tmp_path / "config.d/99-editor.toml~", "not toml at all [")

    config = read(main)

    assert (config.hypervisor.default_memory_mib, config.hypervisor.default_bridges) == (1024, 2)


def test_drop_ins_are_beside_the_resolved_file(tmp_path: Path) -> None:
    real = write(tmp_path / "real/c.toml", "")
    write(tmp_path / "real/config.d/a.toml", "[hypervisor.qemu]\ndefault_memory = 333\n")
    link = tmp_path / "link.toml"
    link.symlink_to(real)

    assert read(link).hypervisor.default_memory_mib == 333


def test_the_first_default_path_that_exists_is_read(tmp_path: Path) -> None:
    second = write(tmp_path / "second.toml", "")

    assert read_source(None, {}, (str(tmp_path / "first.toml"), str(second))).path == str(second)
    with pytest.raises(FailedPrecondition, match=r"first\.toml"):
        read_source(None, {}, (str(tmp_path / "first.toml"),))


def test_the_environment_may_only_name_a_default_path(tmp_path: Path) -> None:
    allowed, other = write(tmp_path / "a.toml", ""), write(tmp_path / "b.toml", "")

    assert read_source(None, {"KATA_CONF_FILE": str(allowed)}, (str(allowed),)).path == str(allowed)
    with pytest.raises(InvalidArgument, match="KATA_CONF_FILE"):
        read_source(None, {"KATA_CONF_FILE": str(other)}, (str(allowed),))


def test_a_body_of_the_runtime_options_is_the_configuration() -> None:
    body = b"[hypervisor.qemu]\ndefault_memory = 300\n"

    source = read_source(RuntimeOptions(config_path="", config_body=body), {})

    assert build_config(source).hypervisor.default_memory_mib == 300


BAD = [
    ("not toml [", InvalidArgument, "c.toml"),
    (b"\xff\xfe", InvalidArgument, "not UTF-8"),
    ("[hypervisor.qemu]\ndefault_vcpus = 'two'", InvalidArgument, "hypervisor.qemu.default_vcpus"),
    ("[hypervisor.qemu]\ndefault_vcpus = 4097", InvalidArgument, "4097 is not between 0 and 4096"),
    ("[hypervisor.qemu]\ndefault_bridges = -1", InvalidArgument, "default_bridges"),
    ("[hypervisor.qemu]\ndefault_memory = 63", InvalidArgument, "63 is not between 64 and"),
    ("[hypervisor.qemu]\ndefault_vcpus = nan", InvalidArgument, "nan"),
    ("[hypervisor.qemu]\ndefault_vcpus = 1e400", InvalidArgument, "1e400"),
    ("[hypervisor.qemu]\ndefault_memory = 2.5", InvalidArgument, "whole number"),
    ("[hypervisor.qemu]\ndefault_memory = true", InvalidArgument, "whole number"),
    ("[hypervisor.qemu]\nmachine_type = 'pc'", InvalidArgument, "'pc' is not one of"),
    ("[hypervisor.qemu]\nenable_debug = 'yes'", InvalidArgument, "true or false"),
    ("[hypervisor.qemu]\nvirtio_fs_extra_args = 'a b'", InvalidArgument, "list of strings"),
    ("[hypervisor]\nqemu = 3", InvalidArgument, "not a table"),
    ("[hypervisor.clh]\npath = 'x'", FailedPrecondition, "hypervisor.clh"),
    ("a = 1\na = 2", InvalidArgument, "c.toml"),
    ("x = " + "[" * 3000, InvalidArgument, "c.toml"),
]


@pytest.mark.parametrize(("text", "error", "named"), BAD, ids=[str(row[2]) + str(n) for n, row in enumerate(BAD)])
def test_bad_input_is_named(tmp_path: Path, text: str | bytes, error: type[ShimError], named: str) -> None:
    with pytest.raises(error) as caught:
        read(write(tmp_path / "c.toml", text))

    assert named in str(caught.value)
    assert "c.toml" in str(caught.value)


def test_a_missing_directory_or_huge_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="No such file"):
        read(tmp_path / "gone.toml")
    with pytest.raises(FailedPrecondition, match="directory"):
        read(tmp_path)
    huge = tmp_path / "huge.toml"
    with huge.open("wb") as file:
        file.truncate(50_000_000)
    with pytest.raises(InvalidArgument, match="larger than"):
        read(huge)


def test_every_key_without_effect_is_named_once(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.toml",
        """
        [hypervisor.qemu]
        kernal = "/x"
        enable_swap = true
        [runtime]
        jaeger_endpoint = "http://localhost:14268/api/traces"
        jaeger_user = ""
        [factory]
        vm_cache_number = 1
        [odd]
        a = 1
        [proxy.kata]
        path = "/p"
        """,
    )

    found = warnings(examine(read_source(options(path), {})))

    assert found == (
        "hypervisor.qemu.kernal is not a known key (did you mean kernel?)",
        "hypervisor.qemu.enable_swap was removed from Kata: guest memory follows the host's swap settings",
        "runtime.jaeger_endpoint has no effect: spans are sent as OTLP, which Jaeger accepts on port 4318"
        " (otlp_endpoint)",
        "factory.vm_cache_number has no effect: not implemented yet",
        "odd is not a known table",
        "proxy was removed from Kata: the shim speaks to the agent itself",
    )


def test_keys_without_effect_are_logged_at_a_sandboxs_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "c.toml", "[factory]\nvm_cache_number = 1\n")

    load_config(options(path), {"io.katacontainers.config.runtime.agent_name": "other", "other": "x"}, {})

    assert [record.problem for record in caplog.records] == [
        "factory.vm_cache_number has no effect: not implemented yet",
        "annotation io.katacontainers.config.runtime.agent_name has no effect: there is only one",
    ]
