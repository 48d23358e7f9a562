"""Real mounts, in a mount namespace of the test's own."""

import errno
import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from pyshim.host import syscalls
from pyshim.host.mounts.mounting import make_target, open_target, perform_mount
from pyshim.host.mounts.table import mounted_below, mounted_files, unmount_all, unmount_beneath
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError, Unimplemented
from pyshim.model.ids import HostPath
from pyshim.model.volumes import HostMount, Propagation, TargetKind

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("private_mounts")]


def host_mount(
    source: Path | str,
    target: Path,
    *options: str,
    fs_type: str = "bind",
    kind: TargetKind = TargetKind.DIRECTORY,
    propagation: Propagation | None = None,
    beneath: Path | None = None,
) -> HostMount:
    return HostMount(
        type=fs_type,
        source=str(source),
        target=HostPath(str(target)),
        target_kind=kind,
        options=options,
        propagation=propagation,
        beneath=None if beneath is None else HostPath(str(beneath)),
    )


def is_writable(directory: Path) -> bool:
    try:
        (directory / "probe").touch()
    except OSError:
        return False
    (directory / "probe").unlink()
    return True


def make_share(root: Path) -> tuple[Path, Path]:
    mounts, shared = root / "mounts", root / "shared"
    perform_mount(host_mount(mounts, mounts, "bind", propagation=Propagation.SHARED))
    perform_mount(host_mount(mounts, shared, "bind", "ro", propagation=Propagation.SLAVE))
    return mounts, shared


@pytest.mark.parametrize(("word", "writable"), [("ro", False), ("rw", True)])
def test_a_bind_is_as_writable_in_the_guests_copy_as_on_the_host(tmp_path: Path, word: str, writable: bool) -> None:
    (tmp_path / "source").mkdir()

    mounts, shared = make_share(tmp_path)

    perform_mount(host_mount(tmp_path / "source", mounts / "c/rootfs", "rbind", word, beneath=mounts))

    assert is_writable(mounts / "c/rootfs") is writable
    assert is_writable(shared / "c/rootfs") is writable
    assert not is_writable(shared)


def test_device_nodes_of_a_volume_are_dead_in_the_share_and_alive_outside(tmp_path: Path) -> None:
    """Also those of a file system mounted below the volume, in both trees: the exported one is virtiofsd's."""
    source = tmp_path / "source"
    nodes = ("null", "below/null")

    def opened(root: Path) -> list[int]:
        found = []
        for node in nodes:
            try:
                os.close(os.open(root / node, os.O_RDONLY))
                found.append(0)
            except OSError as error:
                found.append(error.errno or -1)
        return found

    perform_mount(host_mount("tmpfs", source, fs_type="tmpfs"))
    perform_mount(host_mount("tmpfs", source / "below", fs_type="tmpfs"))
    for node in nodes:
        os.mknod(source / node, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    mounts, shared = make_share(tmp_path)

    perform_mount(host_mount(source, mounts / "volume", "rbind", beneath=mounts))

    assert opened(source) == [0, 0]
    assert opened(mounts / "volume") == opened(shared / "volume") == [errno.EACCES, errno.EACCES]


def test_unmounting_the_hosts_mount_takes_the_guests_copy_along(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()

    mounts, shared = make_share(tmp_path)
    perform_mount(host_mount(tmp_path / "source", mounts / "c/rootfs", "rbind", beneath=mounts))

    unmount_all(f"{mounts}/c/rootfs")

    assert mounted_below(str(shared)) == (str(shared),)


def test_read_only_recursive_bind_changes_the_top_mount_as_mount_does_and_rro_all(tmp_path: Path) -> None:
    inner = tmp_path / "source/inner"
    perform_mount(host_mount("tmpfs", inner, fs_type="tmpfs"))

    perform_mount(host_mount(tmp_path / "source", tmp_path / "ro", "rbind", "ro"))
    perform_mount(host_mount(tmp_path / "source", tmp_path / "rro", "rbind", "rro"))

    assert not is_writable(tmp_path / "ro")
    assert is_writable(tmp_path / "ro/inner")
    assert not is_writable(tmp_path / "rro/inner")


def test_one_look_tells_where_paths_lead_and_what_is_mounted_below(tmp_path: Path) -> None:
    for name in ("plain", "above/a b/c", "top"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("above")
    perform_mount(host_mount("tmpfs", tmp_path / "above/a b/c", fs_type="tmpfs"))
    perform_mount(host_mount("tmpfs", tmp_path / "top", fs_type="tmpfs"))
    (tmp_path / "top/x/y").mkdir(parents=True)
    perform_mount(host_mount(tmp_path / "top/x", tmp_path / "plain", "bind"))
    perform_mount(host_mount("tmpfs", tmp_path / "top", fs_type="tmpfs"))

    found = mounted_files([str(tmp_path / name) for name in ("plain/y", "above", "above/a b", "link", "top", "gone")])
    by_name = {path.removeprefix(f"{tmp_path}/"): place for path, place in found.items()}

    assert [name for name, place in by_name.items() if place.mounts_below] == ["above", "above/a b", "link"]
    assert by_name["link"] == by_name["above"]
    assert by_name["plain/y"].file.endswith("/x/y"), "by the bind's own directory of the tmpfs"
    assert by_name["top"].file != by_name["plain/y"].file.removesuffix("/x/y"), "the upper of two mounts"
    assert "gone" not in by_name


def test_a_bind_keeps_the_restrictions_of_its_source(tmp_path: Path) -> None:
    perform_mount(host_mount("tmpfs", tmp_path / "source", "nosuid", "noexec", fs_type="tmpfs"))

    perform_mount(host_mount(tmp_path / "source", tmp_path / "target", "bind", "ro"))

    flags = os.statvfs(tmp_path / "target").f_flag
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NOEXEC
    assert flags & os.ST_RDONLY


def test_remount_keeps_what_it_does_not_name(tmp_path: Path) -> None:
    target = tmp_path / "target"
    perform_mount(host_mount("tmpfs", tmp_path / "source", "nodev", fs_type="tmpfs"))
    perform_mount(host_mount(tmp_path / "source", target, "bind"))

    perform_mount(host_mount("", target, "bind", "remount", "ro"))

    flags = os.statvfs(target).f_flag
    assert flags & os.ST_RDONLY
    assert flags & os.ST_NODEV
    assert mounted_below(str(target)) == (str(target),)


def test_the_mount_point_of_a_file_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1")

    target = tmp_path / "deep/er/hosts"

    perform_mount(host_mount(tmp_path / "hosts", target, "bind", "ro", kind=TargetKind.LIKE_SOURCE))

    assert target.read_text() == "127.0.0.1"


def test_a_hundred_layers_mount_from_any_directory_and_leave_it_alone(tmp_path: Path) -> None:
    lowers = [tmp_path / f"snapshots-with-a-long-name/{i}/fs" for i in range(100)]
    for index, lower in enumerate(lowers):
        lower.mkdir(parents=True)
        (lower / f"layer{index}").touch()
    for name in ("upper", "work"):
        (tmp_path / name).mkdir()

    before = os.getcwd()
    options = (f"workdir={tmp_path}/work", f"upperdir={tmp_path}/upper", "lowerdir=" + ":".join(map(str, lowers)))
    assert len(",".join(options)) > 4096

    perform_mount(host_mount("overlay", tmp_path / "rootfs", *options, fs_type="overlay"))

    assert len(os.listdir(tmp_path / "rootfs")) == 100
    assert is_writable(tmp_path / "rootfs")
    assert os.getcwd() == before
    assert threading.active_count() == 1


def test_options_too_long_for_the_kernel_are_refused_not_cut(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="exceed the kernel's"):
        perform_mount(host_mount("tmpfs", tmp_path / "t", "mode=" + "7" * 5000, fs_type="tmpfs"))

    assert mounted_below(str(tmp_path)) == ()


def loops_of(path: Path) -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [file.parent.parent.name for file in files if file.read_text().strip() == str(path)]


@pytest.mark.skipif(not os.path.exists("/dev/loop-control"), reason="needs /dev/loop-control")
@pytest.mark.parametrize(("words", "writable"), [(("loop", "ro"), False), (("loop",), True)], ids=["ro", "rw"])
def test_a_loop_device_lives_as_long_as_its_mount(tmp_path: Path, words: tuple[str, ...], writable: bool) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"")
    os.truncate(image, 8 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)

    target = tmp_path / "target"

    perform_mount(host_mount(image, target, *words, fs_type="ext4"))

    assert len(loops_of(image)) == 1
    assert is_writable(target) is writable
    unmount_all(str(target))
    assert loops_of(image) == []


def test_a_failed_loop_mount_leaves_no_device(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))

    with pytest.raises(ShimError, match="ext4"):
        perform_mount(host_mount(image, tmp_path / "target", "loop", fs_type="ext4"))

    assert loops_of(image) == []
    assert mounted_below(str(tmp_path)) == ()


@pytest.mark.parametrize(
    "link",
    [
        pytest.param("/etc", id="absolute"),
        pytest.param("../outside", id="relative"),
        pytest.param("/proc/self/cwd", id="magic"),
    ],
)
@pytest.mark.parametrize("tail", ["", "/below"], ids=["last", "inner"])
def test_a_link_planted_by_the_guest_does_not_lead_a_mount_out_of_the_share(
    tmp_path: Path, link: str, tail: str
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "outside").mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / "trap").symlink_to(link)

    target = Path(f"{root}/trap{tail}")

    with pytest.raises(FailedPrecondition):
        perform_mount(host_mount(tmp_path / "source", target, "bind", beneath=root))

    assert os.listdir(tmp_path / "outside") == []
    assert mounted_below("/etc") == mounted_below(str(tmp_path)) == ()


def test_a_link_planted_after_the_mount_point_was_made_does_not_lead_out_either(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").mkdir()
    mount = host_mount("/nowhere", tmp_path / "root/point", "bind", beneath=tmp_path / "root")
    make_target(mount)
    (tmp_path / "root/point").rmdir()
    (tmp_path / "root/point").symlink_to("../outside")

    with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
        open_target(mount)


@pytest.mark.parametrize("target", ["../out", "a/../../out"], ids=["leading", "inner"])
def test_dots_do_not_lead_a_mount_out_of_the_share(tmp_path: Path, target: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "root").mkdir()

    with pytest.raises(FailedPrecondition, match="leads out of"):
        perform_mount(
            HostMount(
                type="bind",
                source=str(tmp_path / "source"),
                target=HostPath(f"{tmp_path}/root/{target}"),
                target_kind=TargetKind.DIRECTORY,
                options=("bind",),
                propagation=None,
                beneath=HostPath(str(tmp_path / "root")),
            )
        )

    assert not (tmp_path / "out").exists()


def test_a_link_that_stays_in_the_share_is_followed(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "root/real").mkdir(parents=True)
    (tmp_path / "root/link").symlink_to("real")

    perform_mount(host_mount(tmp_path / "source", tmp_path / "root/link/x", "bind", beneath=tmp_path / "root"))

    assert mounted_below(str(tmp_path)) == (str(tmp_path / "root/real/x"),)


@pytest.mark.parametrize(
    ("fs_type", "source", "error", "text"),
    [
        pytest.param("bind", "/nowhere", FailedPrecondition, "/nowhere", id="source is missing"),
        pytest.param("nosuchfs", "x", FailedPrecondition, "no file system 'nosuchfs'", id="unknown file system"),
        pytest.param("fuse.sshfs", "x", Unimplemented, "FUSE", id="fuse"),
        pytest.param("tmpfs", "x", InvalidArgument, "nonsense=1", id="unknown word"),
    ],
)
def test_an_error_names_target_and_cause_and_leaves_nothing(
    tmp_path: Path, fs_type: str, source: str, error: type[ShimError], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        perform_mount(host_mount(source, tmp_path / "target", "nonsense=1", fs_type=fs_type))

    assert f"{tmp_path}/target" in str(caught.value)
    assert mounted_below(str(tmp_path)) == ()


def test_every_layer_of_a_mount_point_is_unmounted_and_again_is_harmless(tmp_path: Path) -> None:
    target = tmp_path / "with space\nand\\newline"
    for _ in range(3):
        perform_mount(host_mount("tmpfs", target, fs_type="tmpfs"))
    perform_mount(host_mount("tmpfs", target / "inner", fs_type="tmpfs"))
    assert mounted_below(str(tmp_path)) == (str(target / "inner"), *(str(target),) * 3)

    unmount_all(str(target))

    assert mounted_below(str(tmp_path)) == ()
    unmount_all(str(target))
    unmount_all(str(tmp_path / "missing"))


def test_each_layer_takes_one_call_and_a_path_without_a_mount_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unmount can take many seconds on a busy disk, and containerd gives the removal of a task ten."""
    calls: list[str] = []
    unmount = syscalls.umount2

    def counted(target: str, flags: int) -> None:
        calls.append(target)
        unmount(target, flags)

    for _ in range(2):
        perform_mount(host_mount("tmpfs", tmp_path / "root/target", fs_type="tmpfs"))
    monkeypatch.setattr(syscalls, "umount2", counted)

    unmount_beneath(str(tmp_path / "root"), str(tmp_path / "root/target"))
    unmount_beneath(str(tmp_path / "root"), str(tmp_path / "root/target"))

    assert mounted_below(str(tmp_path)) == ()
    assert len(calls) == 2


def test_a_mount_in_use_is_unmounted_all_the_same(tmp_path: Path) -> None:
    perform_mount(host_mount("tmpfs", tmp_path / "target", fs_type="tmpfs"))
    with open(tmp_path / "target/held", "w"):
        unmount_all(str(tmp_path / "target"))

        assert os.listdir(tmp_path / "target") == []


def test_unmounting_does_not_follow_a_link(tmp_path: Path) -> None:
    perform_mount(host_mount("tmpfs", tmp_path / "target", fs_type="tmpfs"))
    (tmp_path / "link").symlink_to(tmp_path / "target")

    unmount_all(str(tmp_path / "link"))

    assert mounted_below(str(tmp_path / "link")) == ()
    assert mounted_below(str(tmp_path)) == (str(tmp_path / "target"),)


def test_a_sibling_with_the_same_beginning_is_not_below(tmp_path: Path) -> None:
    for name in ("a", "ab"):
        perform_mount(host_mount("tmpfs", tmp_path / name, fs_type="tmpfs"))

    assert mounted_below(str(tmp_path / "a")) == (str(tmp_path / "a"),)
