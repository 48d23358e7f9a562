"""Additions to each containerd's configuration, and refused configurations."""

import dataclasses
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from integration.framework.containerd import DEBIAN
from integration.framework.releases import NEWEST, RELEASES, Release, found_newest
from pyshim.model.errors import AlreadyExists, FailedPrecondition, ShimError, Unimplemented
from pyshim.node.install.containerd_config import runtimes_in
from pyshim.node.install.drop_ins import Containerd, containerd_writes, crio_text
from pyshim.node.install.handlers import HANDLERS
from pyshim.node.install.writes import BlockWrite, FileWrite, Write, block_in, with_block, without_block

SHIM = "/opt/pyshim/bin/containerd-shim-pykata-v2"
DROP_IN = "/etc/containerd/conf.d/pyshim.toml"
CONFIGS = Path(__file__).resolve().parents[4] / "configs" / "containerd"
NAMES = {handler.name for handler in HANDLERS}
RUNC_NAMED = """\
version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""
IMPORTING = 'version = 3\nimports = ["conf.d/*.toml"]\n'


def addition(version: tuple[int, int], text: str | None, *, runtimes: frozenset[str] = frozenset()) -> list[Write]:
    containerd = Containerd(
        version=version, config_path="/etc/containerd/config.toml", config_text=text, effective_runtimes=runtimes
    )
    return containerd_writes(containerd, HANDLERS, shim=SHIM)


def whole(text: str | None, writes: list[Write]) -> str:
    """config.toml afterwards."""
    for write in writes:
        if isinstance(write, BlockWrite):
            return write.body if text is None else with_block(text, write.body, first=write.first)
    return text or ""


def drop_in_of(writes: list[Write]) -> str | None:
    return next((write.content for write in writes if isinstance(write, FileWrite)), None)


@pytest.mark.parametrize(
    ("version", "text", "in_config", "has_drop_in"),
    [
        pytest.param((1, 6), None, {"runc", *NAMES}, False, id="1.6-no-configuration"),
        pytest.param((1, 6), DEBIAN, {"runc", *NAMES}, False, id="1.6-debian-12"),
        pytest.param(
            (1, 7), 'imports = ["conf.d/*.toml"]\n' + DEBIAN, {"runc", *NAMES}, False, id="1.7-imports-discard"
        ),
        pytest.param((1, 7), RUNC_NAMED, {"runc", *NAMES}, False, id="1.7-names-runc-itself"),
        pytest.param((2, 1), RUNC_NAMED, {"runc", *NAMES}, False, id="2.1-configuration-of-version-2"),
        pytest.param((2, 1), None, set(), True, id="2.1-no-configuration"),
        pytest.param((2, 1), "version = 3\n", set(), True, id="2.1-without-imports"),
        pytest.param((2, 3), IMPORTING, set(), True, id="2.3-with-imports"),
        pytest.param((2, 3), IMPORTING.replace("3", "4"), set(), True, id="2.3-configuration-of-version-4"),
        pytest.param((2, 3), "version = 4\n", set(), True, id="2.3-version-4-without-imports"),
        pytest.param((2, 3), "version = 4\nimports = []\n", NAMES, False, id="2.3-version-4-imports-nothing"),
        pytest.param((2, 3), 'version = 3\nimports = ["/etc/a/*.toml"]\n', NAMES, False, id="2.3-imports-unbounded"),
    ],
)
def test_each_containerd_gets_what_it_reads(
    version: tuple[int, int], text: str | None, in_config: set[str], has_drop_in: bool
) -> None:
    made = addition(version, text)

    document = tomllib.loads(whole(text, made))
    assert runtimes_in(document).keys() == in_config
    drop_in = drop_in_of(made)
    assert (drop_in is not None) is has_drop_in
    if drop_in is not None:
        assert runtimes_in(tomllib.loads(drop_in)).keys() == NAMES
        assert tomllib.loads(drop_in)["version"] == document["version"], "another is migrated, with a warning"
        assert any(
            pattern in (DROP_IN, "conf.d/*.toml", "/etc/containerd/conf.d/*.toml") for pattern in document["imports"]
        )


@pytest.mark.parametrize(
    ("version", "text", "runtimes", "error", "words"),
    [
        ((1, 5), DEBIAN, (), Unimplemented, "containerd 1.5: known are"),
        ((3, 0), None, (), Unimplemented, "containerd 3.0: known are"),
        ((1, 6), "version = [", (), FailedPrecondition, "parse '/etc/containerd/config.toml': "),
        ((1, 6), 'root = "/x"\n', (), FailedPrecondition, "has no 'version'"),
        ((1, 6), "version = 3\n", (), FailedPrecondition, "of version 3, and 2 is needed"),
        ((1, 7), 'root = "/x"\n', (), FailedPrecondition, "(hint: 'containerd config default' prints one)"),
        ((2, 1), 'root = "/x"\n', (), FailedPrecondition, "(hint: 'containerd config migrate' prints one)"),
        ((2, 2), "version = 4\n", (), FailedPrecondition, "of version 4, and 2 or 3 is needed"),
        ((2, 3), "version = 5\n", (), FailedPrecondition, "of version 5, and 2 or 3 or 4 is needed"),
        ((2, 3), "version = 5\n", (), FailedPrecondition, "(hint: 'containerd config default' prints one)"),
        ((1, 6), 'version = 2\ndisabled_plugins = ["cri"]\n', (), FailedPrecondition, "disables the CRI plugin"),
        ((2, 4), 'disabled_plugins = ["cri"]\n', (), FailedPrecondition, "--kind docker needs no CRI"),
        ((1, 6), RUNC_NAMED.replace("runc]", "pykata-tdx]"), (), AlreadyExists, "add runtime 'pykata-tdx'"),
        ((2, 1), IMPORTING, ("pykata",), AlreadyExists, "add runtime 'pykata' to containerd"),
        ((2, 3), None, ("pykata",), AlreadyExists, "add runtime 'pykata' to containerd"),
    ],
)
def test_an_unsuitable_configuration_is_refused(
    version: tuple[int, int], text: str | None, runtimes: tuple[str, ...], error: type[ShimError], words: str
) -> None:
    with pytest.raises(error) as caught:
        addition(version, text, runtimes=frozenset(runtimes))

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("version", "name"), [((1, 6), "containerd-1.x-pykata.toml"), ((2, 1), "containerd-2.x-pykata.toml")]
)
def test_the_handler_is_that_of_the_shipped_file(version: tuple[int, int], name: str) -> None:
    made = addition(version, None)
    ours = runtimes_in(tomllib.loads(drop_in_of(made) or whole(None, made)))["pykata"]

    assert ours.pop("runtime_path") == SHIM
    assert ours.pop("options") == {"ConfigPath": "/etc/pyshim/configuration.toml"}
    assert ours == runtimes_in(tomllib.loads((CONFIGS / name).read_text()))["pykata"]


def test_crio_gets_every_handler_as_a_vm() -> None:
    runtimes = tomllib.loads(crio_text(HANDLERS, SHIM))["crio"]["runtime"]["runtimes"]

    assert {(name, runtime["runtime_type"], runtime["runtime_path"]) for name, runtime in runtimes.items()} == {
        (name, "vm", SHIM) for name in NAMES
    }
    assert runtimes["pykata-remote"]["runtime_config_path"] == "/etc/pyshim/remote/configuration.toml"


def test_crio_leaves_images_to_the_guests_that_pull_them() -> None:
    runtimes = tomllib.loads(crio_text(HANDLERS, SHIM))["crio"]["runtime"]["runtimes"]

    for handler in HANDLERS:
        config = tomllib.loads((CONFIGS.parent / handler.source).read_text())
        pulls = config.get("runtime", {}).get("experimental_force_guest_pull", not handler.is_local)
        assert runtimes[handler.name].get("runtime_pull_image", False) is pulls, handler.name


@pytest.fixture(params=[*RELEASES, NEWEST])
def release(request: pytest.FixtureRequest) -> Release:
    try:
        found = found_newest() if request.param == NEWEST else RELEASES[request.param]
    except ValueError as error:
        pytest.skip(str(error))
    if not (found.programs / "containerd").exists():
        pytest.skip(
            f"no containerd {found.generation} (hint: make integration CONTAINERD={found.generation} builds it)"
        )
    if found.is_built:
        return found
    (numbers,) = re.findall(r"^\S+ \S+ v?(\d+\.\d+)\.", asked(found, "--version"))
    return dataclasses.replace(found, generation=numbers)  # the distribution's, Debian 12's or a later one


def test_each_release_reads_its_own_default_with_the_handlers(release: Release, tmp_path: Path) -> None:
    default = asked(release, "config", "default")

    dump = dumped_with_handlers(release, default, tmp_path)

    before, after = runtimes_in(tomllib.loads(default)), runtimes_in(dump)
    assert after.keys() == {*before, *NAMES}
    assert after["runc"].items() >= before["runc"].items()
    assert after["pykata"]["runtime_path"] == SHIM
    assert dump["plugins"][release.cri_table.split('"')[1]]["containerd"]["default_runtime_name"] == "runc"


def test_debians_configuration_keeps_its_settings(tmp_path: Path) -> None:
    release = RELEASES["1.6"]
    if not (release.programs / "containerd").exists() or " 1.6" not in asked(release, "--version"):
        pytest.skip("no containerd 1.6 of Debian's")

    cri = dumped_with_handlers(release, DEBIAN, tmp_path)["plugins"]["io.containerd.grpc.v1.cri"]

    assert cri["cni"]["bin_dir"] == "/usr/lib/cni"
    assert cri["containerd"]["default_runtime_name"] == "runc"
    assert cri["containerd"]["runtimes"].keys() == {"runc", *NAMES}


def asked(release: Release, *words: str) -> str:
    return subprocess.run([release.programs / "containerd", *words], capture_output=True, text=True, check=True).stdout


def dumped_with_handlers(release: Release, text: str, directory: Path) -> dict[str, Any]:
    """The configuration as this containerd reads it, with what `text` gets; `directory` is its /etc/containerd."""
    made = addition((release.numbers[0], release.numbers[1]), text)
    config = directory / "config.toml"
    config.write_text(whole(text, made).replace("/etc/containerd/", f"{directory}/"))
    (directory / "conf.d").mkdir()
    if (drop_in := drop_in_of(made)) is not None:
        (directory / "conf.d" / "pyshim.toml").write_text(drop_in)
    return tomllib.loads(asked(release, "--config", str(config), "config", "dump"))


@pytest.mark.parametrize("text", [IMPORTING, RUNC_NAMED], ids=["version-3", "version-2"])
def test_pods_without_a_pause_container_are_the_sandboxers_choice(text: str) -> None:
    handlers = tuple(replace(handler, sandboxer="shim") for handler in HANDLERS)
    containerd = Containerd(version=(2, 3), config_path="/etc/containerd/config.toml", config_text=text)

    made = containerd_writes(containerd, handlers, shim=SHIM)

    found = runtimes_in(tomllib.loads(drop_in_of(made) or whole(None, made)))
    assert {found[handler.name]["sandboxer"] for handler in handlers} == {"shim"}


def test_a_snapshotter_is_that_of_the_handlers_whose_guests_do_not_pull() -> None:
    handlers = tuple(replace(handler, snapshotter="erofs") for handler in HANDLERS)
    containerd = Containerd(version=(2, 3), config_path="/etc/containerd/config.toml", config_text=IMPORTING)

    made = containerd_writes(containerd, handlers, shim=SHIM)

    found = runtimes_in(tomllib.loads(drop_in_of(made) or whole(None, made)))
    named = {handler.name for handler in handlers if found[handler.name].get("snapshotter") == "erofs"}
    assert named == {handler.name for handler in handlers if not handler.guest_pulls}
    assert {"pykata"} <= named < {handler.name for handler in handlers}


def test_a_containerd_before_the_sandbox_api_is_refused_for_it() -> None:
    handlers = tuple(replace(handler, sandboxer="shim") for handler in HANDLERS)
    containerd = Containerd(version=(2, 2), config_path="/etc/containerd/config.toml", config_text=None)

    with pytest.raises(FailedPrecondition, match=r'^configure containerd 2.2: sandboxer "shim" needs 2.3'):
        containerd_writes(containerd, handlers, shim=SHIM)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("text", ["", "version = 2\n", "version = 2", "a\n\n\n", "\n", "a\r\n"])
def test_a_block_comes_out_as_it_went_in(text: str, first: bool) -> None:
    marked = with_block(text, "b = 1\n", first=first)

    assert block_in(marked) == "b = 1\n"
    assert without_block(marked) == text
    assert block_in(text) is None
    assert without_block(text) == text


def test_a_block_without_its_end_is_refused() -> None:
    marked = with_block("", "b = 1\n", first=True).replace("# end pyshim", "")

    with pytest.raises(ValueError, match="has no line '# end pyshim'"):
        without_block(marked)
