"""An installation on a directory in place of the node: all of it or nothing, and gone without a trace."""

import errno
import json
import os
import shutil
import signal
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from integration.framework.containerd import DEBIAN
from pyshim.model.errors import AlreadyExists, FailedPrecondition, InvalidArgument, ShimError
from pyshim.node.cli.options import handlers_of
from pyshim.node.cli.signals import undone_at_signals
from pyshim.node.install.apply import apply, changes, edits, foreign_text, remove
from pyshim.node.install.daemon_json import DAEMON_JSON
from pyshim.node.install.disk import Disk, Found
from pyshim.node.install.drop_ins import Containerd
from pyshim.node.install.handlers import HANDLERS, Handler, chosen_handlers, installed_handlers
from pyshim.node.install.manifest import Manifest, manifest_path, read_manifest
from pyshim.node.install.plan import CRIO_DROP_IN, PREFIX, InstallPlan, Release, install_plan
from pyshim.node.install.runtime import installed_kind, node_daemon_json

CONFIG = "/etc/containerd/config.toml"
_SHIPPED = Path(__file__).resolve().parents[4] / "configs"
CONFIGS = {str(path.relative_to(_SHIPPED)): path.read_text() for path in _SHIPPED.rglob("*.*") if path.is_file()}
DOCKERS = """\
{
  "log-driver": "journald",
  "runtimes": {
    "other": {
      "path": "/usr/bin/crun"
    }
  },
  "label": "größer"
}
"""
FIRST, SECOND = (Release(id=f"0.1.0-{letter * 12}", python="3.11") for letter in "ab")


class Fault(Exception):
    pass


class FaultyDisk(Disk):
    """The change of number `at`, counted from 0, fails as a full disk does. `made` counts them."""

    def __init__(self, root: str, at: int = -1) -> None:
        super().__init__(root)
        self._at = at
        self.made = 0

    def _count(self) -> None:
        self.made += 1
        if self.made - 1 == self._at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, path: str, found: Found) -> None:
        self._count()
        super().write(path, found)

    def make_directory(self, path: str) -> None:
        self._count()
        super().make_directory(path)

    def move(self, source: str, target: str) -> None:
        self._count()
        super().move(source, target)


def everything(root: Path) -> dict[str, tuple[int, bytes]]:
    """Path, mode and content of all there is."""
    found: dict[str, tuple[int, bytes]] = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (stat.S_IMODE(mode), content)
    return found


def plan(
    disk: Disk, release: Release = FIRST, names: tuple[str, ...] = (), version: tuple[int, int] = (1, 6)
) -> InstallPlan:
    return install_plan(
        prefix=PREFIX,
        release=release,
        handlers=chosen_handlers(names, settings_of),
        configs=CONFIGS,
        manual=".TH PYSHIM 1\n",
        containerd=Containerd(version=version, config_path=CONFIG, config_text=foreign_text(disk, CONFIG)),
        has_crio=True,
        daemon_json=node_daemon_json(
            disk, chosen_handlers(names, settings_of), read_manifest(disk, PREFIX) or Manifest()
        ),
    )


def settings_of(_handler: Handler, path: str) -> str:
    return f"# {path}\n"


def make_release(disk: Disk, made: InstallPlan) -> Callable[[str], None]:
    def fill(directory: str) -> None:
        os.makedirs(disk.at(f"{directory}/venv"))
        Path(disk.at(f"{directory}/venv/code")).write_text(made.release.id)

    return fill


def install(disk: Disk, made: InstallPlan, **options: object) -> object:
    return apply(made, disk, make_release=make_release(disk, made), **options)  # type: ignore[arg-type]


@pytest.fixture
def node(tmp_path: Path) -> Path:
    for name in ("opt", "usr/local/bin", "etc/containerd", "etc/crio/crio.conf.d", "etc/systemd/system", "etc/docker"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / DAEMON_JSON[1:]).write_text(DOCKERS)
    config = tmp_path / CONFIG[1:]
    config.write_text(DEBIAN)
    config.chmod(0o600)
    return tmp_path


def test_install_again_upgrade_and_uninstall(node: Path) -> None:
    disk, before = Disk(str(node)), everything(node)

    assert install(disk, plan(disk))
    manifest = read_manifest(disk, PREFIX)
    assert manifest is not None
    assert (manifest.release, manifest.is_complete) == (FIRST.id, True)
    installed = everything(node)
    assert installed["etc/containerd/config.toml"][0] == 0o600
    assert FIRST.id.encode() in installed["opt/pyshim/bin/containerd-shim-pykata-v2"][1]
    assert installed["usr/local/bin/containerd-shim-pykata-v2"][1] == b"/opt/pyshim/bin/containerd-shim-pykata-v2"
    assert b"enable_debug = true" in installed["etc/pyshim/debug/configuration.toml"][1]
    assert b"enable_template = true" in installed["etc/pyshim/warm/configuration.toml"][1]
    assert b"enable_template = false" in installed["etc/pyshim/configuration.toml"][1]
    assert f"/opt/pyshim/releases/{FIRST.id}/guest/vmlinux".encode() in installed["etc/pyshim/configuration.toml"][1]

    assert install(disk, plan(disk)) == ()
    assert everything(node) == installed

    assert install(disk, plan(disk, SECOND, ("pykata",)))
    upgraded = everything(node)
    assert "etc/pyshim/tdx/configuration.toml" not in upgraded
    assert b"pykata-tdx" not in upgraded["etc/containerd/config.toml"][1]
    runtimes = json.loads(upgraded[DAEMON_JSON[1:]][1])["runtimes"]
    assert list(runtimes) == ["other", "pykata"]
    assert runtimes["pykata"]["options"] == {"ConfigPath": "/etc/pyshim/configuration.toml"}
    assert f"opt/pyshim/releases/{FIRST.id}/venv/code" in upgraded  # of running pods

    assert remove(disk, PREFIX)
    assert everything(node) == before
    assert remove(disk, PREFIX) == ()


@pytest.mark.parametrize("what", ["install", "upgrade"])
def test_a_full_disk_at_any_step_leaves_the_node_as_it_was(node: Path, what: str) -> None:
    if what == "upgrade":
        install(Disk(str(node)), plan(Disk(str(node))))
    before = everything(node)
    counting = FaultyDisk(str(node))
    made = plan(counting, SECOND)
    with pytest.raises(Fault):
        install(counting, made, check=_refuse)
    assert everything(node) == before
    steps = counting.made

    for step in range(steps):
        with pytest.raises((OSError, Fault)) as caught:
            install(FaultyDisk(str(node), step), made, check=_refuse)
        if caught.type is Fault:  # the undo has begun, and its step failed
            assert caught.value.__notes__ == [f"undo failed: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"]
            assert step > len(made.writes) / (1 if what == "install" else 4)
            break
        assert everything(node) == before


def _refuse() -> None:
    raise Fault


def test_a_handler_of_ones_own_has_the_files_of_its_base_and_its_settings(node: Path) -> None:
    disk = Disk(str(node))
    install(disk, plan(disk, names=("gpu:pykata-debug=gpu.toml", "pykata=usual.toml")))

    found = everything(node)
    own, base = "etc/pyshim/classes/gpu/configuration.toml", "etc/pyshim/configuration.toml"
    assert b"enable_debug = true" in found[own][1]
    assert b"Settings of your own: /etc/pyshim/classes/gpu/config.d/*.toml" in found[own][1]
    assert found["etc/pyshim/classes/gpu/config.d/10-install.toml"][1] == b"# gpu.toml\n"
    assert found["etc/pyshim/config.d/10-install.toml"][1] == b"# usual.toml\n"
    runtimes = tomllib.loads(found["etc/crio/crio.conf.d/99-pyshim.conf"][1].decode())["crio"]["runtime"]["runtimes"]
    assert {name: each["runtime_config_path"] for name, each in runtimes.items()} == {
        "pykata": f"/{base}",
        "gpu": f"/{own}",
    }
    manifest = read_manifest(disk, PREFIX)
    assert manifest is not None
    assert installed_handlers([entry.path for entry in manifest.entries]) == ("pykata", "gpu")

    install(disk, plan(disk, names=("pykata",)))
    found = everything(node)
    assert base in found
    assert not [path for path in found if "10-install" in path or path.endswith("gpu/configuration.toml")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpu",), "install handler 'gpu': known are pykata"),
        (("gpu:runc",), "install handler 'gpu': base 'runc' is not known"),
        (("pykata:pykata-tdx",), "install handler 'pykata': it comes with pyshim and has no base 'pykata-tdx'"),
        (("gpu:pykata", "gpu:pykata-tdx"), "install handler 'gpu': it is there twice"),
        (("../x:pykata",), "install handler '../x': give it a name of lower-case letters"),
        ((":pykata",), "install handler '': give it a name"),
        (("state:pykata",), "install handler 'state': give it a name"),
    ],
)
def test_a_word_that_makes_no_handler_is_refused_by_name(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chosen_handlers(words, settings_of)

    assert str(caught.value).startswith(said)
    assert chosen_handlers((), settings_of) == HANDLERS


def test_settings_with_which_no_pod_would_start_are_refused_by_file_and_key(tmp_path: Path) -> None:
    settings = tmp_path / "gpu.toml"
    settings.write_text("[hypervisor.qemu]\ndefault_vcpus = 'many'\n")

    with pytest.raises(InvalidArgument, match=f"default_vcpus in '{settings}'"):
        handlers_of((f"gpu:pykata={settings}",))

    settings.write_text("[hypervisor.qemu]\ndefault_vcpus = 2\n")
    (handler,) = handlers_of((f"gpu:pykata={settings}",))
    assert (handler.name, handler.settings) == ("gpu", settings.read_text())


def test_sigterm_half_way_undoes_all_and_is_not_heard_by_the_undo(node: Path) -> None:
    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    disk, before, usual = Disk(str(node)), everything(node), signal.getsignal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), undone_at_signals():
        install(disk, plan(disk), check=terminate, rolled_back=terminate)

    assert everything(node) == before
    assert signal.getsignal(signal.SIGTERM) is usual


def test_a_release_that_cannot_be_made_changes_nothing(node: Path) -> None:
    disk, before = Disk(str(node)), everything(node)

    def fill(directory: str) -> None:
        os.makedirs(disk.at(f"{directory}/venv"))
        raise FailedPrecondition("install the wheel: exit code 1")

    with pytest.raises(FailedPrecondition, match="install the wheel"):
        apply(plan(disk), disk, make_release=fill)

    assert everything(node) == before


def test_a_rollback_is_reported_once_the_check_has_begun(node: Path) -> None:
    disk, before, said = Disk(str(node)), everything(node), []

    with pytest.raises(Fault):
        install(disk, plan(disk), check=_refuse, rolled_back=lambda: said.append(everything(node)))

    assert said == [before]


def test_an_undo_that_fails_does_not_hide_the_error(node: Path) -> None:
    disk = Disk(str(node))

    def rolled_back() -> None:
        raise FailedPrecondition("run 'systemctl restart containerd': exit code 1")

    with pytest.raises(Fault) as caught:
        install(disk, plan(disk), check=_refuse, rolled_back=rolled_back)

    assert caught.value.__notes__ == ["undo failed: run 'systemctl restart containerd': exit code 1"]


class Killed(BaseException):
    pass


def test_a_crash_in_between_is_brought_to_an_end_by_the_next_call(node: Path) -> None:
    before = everything(node)
    steps = FaultyDisk(str(node))
    install(steps, plan(steps))
    remove(Disk(str(node)), PREFIX)

    for step in range(3, steps.made):
        disk = DyingDisk(str(node), step)
        with pytest.raises(Killed):
            install(disk, plan(disk))
        again = Disk(str(node))
        if step % 2:
            install(again, plan(again))
        remove(again, PREFIX)
        assert everything(node) == before, step


class DyingDisk(FaultyDisk):
    """From the change of number `at` on nothing is done any more."""

    def _count(self) -> None:
        self.made += 1
        if self.made > self._at:
            raise Killed


@pytest.mark.parametrize("path", ["/etc/pyshim/configuration.toml", "/opt/pyshim/bin/pyshim"])
def test_an_edited_file_is_shown_and_nothing_is_changed(node: Path, path: str) -> None:
    disk = Disk(str(node))
    install(disk, plan(disk))
    file = node / path[1:]
    file.write_text(file.read_text() + "mine = true\n")
    before = everything(node)
    upgrade = plan(disk, SECOND)

    assert f"--- {path}" in "".join(edits(upgrade, read_manifest(disk, PREFIX) or Manifest(), disk))
    assert "-mine = true\n" in edits(upgrade, read_manifest(disk, PREFIX) or Manifest(), disk)
    with pytest.raises(FailedPrecondition, match=f"'{path}' is not as 'pyshim install' wrote it"):
        install(disk, upgrade)
    with pytest.raises(FailedPrecondition, match=f"'{path}' is not as"):
        remove(disk, PREFIX)

    assert everything(node) == before


@pytest.mark.parametrize("path", ["etc/pyshim/configuration.toml", "etc/containerd/config.toml"])
def test_an_edited_file_can_be_kept_and_the_rest_is_installed_and_removed(node: Path, path: str) -> None:
    disk = Disk(str(node))
    install(disk, plan(disk))
    file = node / path
    file.write_text(file.read_text().replace("/etc/pyshim", "/etc/mine") + "# mine\n")
    edited = file.read_bytes()

    made = plan(disk, SECOND)
    apply(made, disk, make_release=make_release(disk, made), keep_edited=True)
    assert file.read_bytes() == edited
    assert SECOND.id.encode() in everything(node)["opt/pyshim/bin/containerd-shim-pykata-v2"][1]
    with pytest.raises(FailedPrecondition, match=f"'/{path}' is not as 'pyshim install' wrote it"):
        remove(disk, PREFIX)

    remove(disk, PREFIX, keep_edited=True)
    assert file.read_bytes() == edited
    assert read_manifest(disk, PREFIX) is None
    assert not (node / "opt/pyshim").exists()


def test_a_file_of_another_keeps_owner_mode_and_byte_order_mark(node: Path) -> None:
    disk, config = Disk(str(node)), node / CONFIG[1:]
    config.write_text("\ufeff" + "version = 3\n")
    os.chown(config, 1234, 4321)
    config.chmod(0o640)

    install(disk, plan(disk, version=(2, 1)))
    status = config.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 4321, 0o640)
    assert config.read_text().startswith("\ufeff# begin pyshim")
    assert config.read_text().count("\ufeff") == 1

    remove(disk, PREFIX)
    assert config.read_text() == "\ufeffversion = 3\n"
    assert (config.stat().st_uid, config.stat().st_gid) == (1234, 4321)


def test_an_edited_block_is_refused_and_the_rest_of_its_file_is_the_operators(node: Path) -> None:
    disk, config = Disk(str(node)), node / CONFIG[1:]
    install(disk, plan(disk))
    config.write_text("# mine\n" + config.read_text() + "# and this\n")

    install(disk, plan(disk, SECOND))
    remove(disk, PREFIX)
    assert config.read_text() == f"# mine\n{DEBIAN}# and this\n"

    install(disk, plan(disk))
    config.write_text(config.read_text().replace("runtimes.pykata]", "runtimes.mine]"))
    with pytest.raises(FailedPrecondition, match=f"'{CONFIG}' is not as"):
        remove(disk, PREFIX)


def test_members_of_others_in_docker_s_file_are_the_operators(node: Path) -> None:
    disk, file = Disk(str(node)), node / DAEMON_JSON[1:]
    install(disk, plan(disk))
    document = json.loads(file.read_text())
    assert document["runtimes"].keys() >= {"other", "pykata", "pykata-debug", "pykata-warm"}
    assert "pykata-tdx" not in document["runtimes"], "its guests pull images themselves, and Docker names none"
    document |= {"debug": True, "runtimes": {"mine": {"path": "/mine"}, **document["runtimes"]}}
    file.write_text(json.dumps(document))

    install(disk, plan(disk, SECOND))
    remove(disk, PREFIX)
    left = json.loads(DOCKERS) | {"debug": True}
    assert json.loads(file.read_text()) == left | {"runtimes": {"mine": {"path": "/mine"}, **left["runtimes"]}}

    install(disk, plan(disk))
    file.write_text(file.read_text().replace("/etc/pyshim/debug", "/etc/mine"))
    edited = everything(node)
    refused: tuple[Callable[[], object], ...] = (
        lambda: install(disk, plan(disk, SECOND)),
        lambda: remove(disk, PREFIX),
    )
    for change in refused:
        with pytest.raises(FailedPrecondition, match=f"'{DAEMON_JSON}' is not as 'pyshim install' wrote it"):
            change()
    assert everything(node) == edited


@pytest.mark.parametrize(
    "text",
    [
        '{\n    "debug": true\n}\n',
        '{\n\t"runtimes": {\n\t\t"other": {\n\t\t\t"path": "/x"\n\t\t}\n\t}\n}',
        '{"debug": true, "runtimes": {"other": {"path": "/x"}}}',
        "{}\n",
    ],
)
def test_docker_s_file_is_as_it_was_after_the_removal(node: Path, text: str) -> None:
    disk, file = Disk(str(node)), node / DAEMON_JSON[1:]
    file.write_text(text)

    install(disk, plan(disk, names=("pykata",)))
    assert "pykata" in json.loads(file.read_text())["runtimes"]
    remove(disk, PREFIX)

    assert file.read_text() == text


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ('{"runtimes": {"pykata": {"path": "/usr/bin/crun"}}}', AlreadyExists, "add runtime 'pykata' to '{path}'"),
        ('{"runtimes": ["pykata"]}', FailedPrecondition, "add runtimes to '{path}': its member 'runtimes' is not"),
        ("[]", FailedPrecondition, "add runtimes to '{path}': "),
        ("{", FailedPrecondition, "add runtimes to '{path}': not JSON"),
    ],
)
def test_a_file_of_docker_s_that_cannot_take_the_runtimes_is_refused(
    node: Path, text: str, error: type[ShimError], words: str
) -> None:
    (node / DAEMON_JSON[1:]).write_text(text)

    with pytest.raises(error) as caught:
        plan(Disk(str(node)))

    assert words.format(path=DAEMON_JSON) in str(caught.value)


def test_a_link_of_docker_s_file_stays_and_a_file_that_is_not_there_goes_again(node: Path) -> None:
    disk, file = Disk(str(node)), node / DAEMON_JSON[1:]
    file.rename(node / "etc/settings.json")
    file.symlink_to("../settings.json")
    before = everything(node)
    install(disk, plan(disk))
    assert "pykata" in json.loads((node / "etc/settings.json").read_text())["runtimes"]
    remove(disk, PREFIX)
    assert everything(node) == before

    shutil.rmtree(node / "etc/docker")
    before = everything(node)
    install(disk, plan(disk))
    assert json.loads(file.read_text()).keys() == {"runtimes"}
    remove(disk, PREFIX)
    assert everything(node) == before


def test_an_installation_for_docker_alone_is_known_as_one(node: Path) -> None:
    disk = Disk(str(node))
    whole = plan(disk)
    made = replace(whole, writes=tuple(each for each in whole.writes if each.path not in (CONFIG, CRIO_DROP_IN)))

    for kind, chosen in ((None, whole), ("docker", made)):
        install(disk, chosen)
        assert installed_kind(read_manifest(disk, PREFIX) or Manifest()) == kind
    assert (node / CONFIG[1:]).read_text() == DEBIAN, "containerd's file is as it was"


def test_a_file_of_another_program_is_left_alone(node: Path) -> None:
    disk = Disk(str(node))
    (node / "usr/local/bin/pyshim").write_text("#!/bin/sh\n")
    before = everything(node)

    with pytest.raises(
        FailedPrecondition, match="'/usr/local/bin/pyshim' exists, and 'pyshim install' did not write it"
    ):
        install(disk, plan(disk))

    assert everything(node) == before


def test_a_file_that_is_gone_comes_back_and_is_no_obstacle(node: Path) -> None:
    disk, before = Disk(str(node)), everything(node)
    install(disk, plan(disk))
    installed = everything(node)
    (node / "etc/pyshim/configuration.toml").unlink()

    install(disk, plan(disk))
    assert everything(node) == installed

    (node / "etc/pyshim/configuration.toml").unlink()
    remove(disk, PREFIX)
    assert everything(node) == before


@pytest.mark.parametrize("text", ["[]", "{", '{"version": 2}'])
def test_a_manifest_that_makes_no_sense_is_refused(node: Path, text: str) -> None:
    disk = Disk(str(node))
    (node / "opt/pyshim").mkdir()
    (node / manifest_path(PREFIX)[1:]).write_text(text)

    with pytest.raises(FailedPrecondition, match=r"read '/opt/pyshim/manifest.json': "):
        install(disk, plan(disk))


def test_the_planned_changes_are_a_value(node: Path) -> None:
    disk, before = Disk(str(node)), everything(node)

    todo = changes(plan(disk), Manifest(), disk)

    assert [change.path for change in todo if change.before] == [CONFIG, DAEMON_JSON]
    assert everything(node) == before
    assert read_manifest(disk, PREFIX) is None
    assert changes(plan(disk), replace(Manifest(), release="x"), disk) == todo
