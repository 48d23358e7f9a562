"""The files of the images, ours and those of packages, and how they are packed."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from guest.image import recipe, rootfs
from guest.image.errors import BuildError
from guest.image.rootfs import (
    PARTITION_OFFSET_BYTES,
    add_kata_agent,
    agent_files,
    library_files,
    pack_initrd,
    partition_table,
)

HERE = Path(rootfs.__file__).parent


def test_agent_files_are_modules_only_and_missing_folders_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one/__pycache__").mkdir(parents=True)
    for name in ("one/b.py", "one/a.py", "one/a.pyi", "one/notes.md", "one/__pycache__/a.pyc", "one/a_pb2_grpc.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(recipe, "AGENT_SOURCES", ("one",))

    assert agent_files(tmp_path) == [tmp_path / "one/a.py", tmp_path / "one/b.py"]

    monkeypatch.setattr(recipe, "AGENT_SOURCES", ("two",))
    with pytest.raises(BuildError, match="take agent sources: two is not in"):
        agent_files(tmp_path)


def test_a_library_comes_with_its_extension_modules_if_any_python_loads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    for name in ("lib/__init__.py", "lib/fast.abi3.so", "lib/py.typed"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(recipe, "AGENT_LIBRARIES", ("lib",))

    assert [file.name for file in library_files(tmp_path)] == ["__init__.py", "fast.abi3.so"]

    (tmp_path / "lib/slow.cpython-313-x86_64-linux-gnu.so").write_text("")
    with pytest.raises(BuildError, match=r"take library lib: slow\.cpython-313.* is for one version of Python"):
        library_files(tmp_path)
    with pytest.raises(BuildError, match="take library lib: it is not in"):
        library_files(tmp_path / "elsewhere")


def test_packages_of_either_layout_end_in_one_and_without_what_the_recipe_leaves_out(tmp_path: Path) -> None:
    for name in ("usr", "usr/lib"):
        (tmp_path / "root" / name).mkdir(parents=True)
    (tmp_path / "root/lib").symlink_to("usr/lib")
    for name in ("lib/old.so", "usr/lib/new.so", "usr/share/doc/tool/copyright", "usr/lib/python3.11/test/__init__.py"):
        (tmp_path / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / name).write_text(name)

    rootfs._merge(tmp_path / "package", tmp_path / "root")

    files = {path.relative_to(tmp_path / "root").as_posix() for path in (tmp_path / "root").rglob("*.*")}
    assert files == {"usr/lib/old.so", "usr/lib/new.so", "usr/lib/python3.11"}
    assert (tmp_path / "root/lib").is_symlink()


def test_the_image_has_one_partition_that_holds_the_file_system(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(partition_table(8192))
    os.truncate(disk, PARTITION_OFFSET_BYTES + 8192)

    argv = ["/bin/busybox", "fdisk", "-l", "-u", disk]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    (partition,) = [line.split() for line in shown.splitlines() if line.startswith(str(disk))]
    assert partition[-6:] == ["4096", "4111", "16", "8192", "83", "Linux"]


def test_busybox_unpacks_the_initrd_to_the_same_tree(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "etc").mkdir(parents=True)
    target.mkdir()
    (source / "etc/odd").write_text("12345")
    (source / "init").write_bytes(bytes(range(256)))
    (source / "init").chmod(0o755)
    (source / "link").symlink_to("etc/odd")

    pack_initrd(source, tmp_path / "initrd.img")
    subprocess.run(
        ["/bin/busybox", "cpio", "-idm"], input=(tmp_path / "initrd.img").read_bytes(), cwd=target, check=True
    )

    found = {path.relative_to(target).as_posix(): path for path in target.rglob("*")}
    assert sorted(found) == ["etc", "etc/odd", "init", "link"]
    assert found["init"].read_bytes() == bytes(range(256))
    assert stat.S_IMODE(found["init"].stat().st_mode) == 0o755
    assert found["link"].readlink() == Path("etc/odd")
    assert found["etc/odd"].stat().st_mtime == recipe.MTIME_S


def test_the_first_process_is_a_script_its_shell_can_read() -> None:
    subprocess.run(["/bin/busybox", "sh", "-n", HERE / "init.sh"], check=True)


@pytest.fixture
def kata_root(tmp_path: Path) -> Path:
    """A root file system with a shell, before an agent is added to it."""
    if os.geteuid() != 0:
        pytest.skip("changing the root needs root")
    for name in ("bin", "etc", "usr/bin"):
        (tmp_path / "root" / name).mkdir(parents=True, exist_ok=True)
    shutil.copy("/bin/busybox", tmp_path / "root/bin/sh")
    return tmp_path / "root"


def test_a_given_kata_agent_is_where_the_first_process_looks_and_mounts_for_itself(
    kata_root: Path, tmp_path: Path
) -> None:
    program = tmp_path / "mine"
    program.write_text("#!/bin/sh\necho kata-agent version 4.1.0\n")

    add_kata_agent(kata_root, program)

    agent = kata_root / "usr/bin/kata-agent"
    assert agent.read_bytes() == program.read_bytes()
    assert stat.S_IMODE(agent.stat().st_mode) == 0o755
    assert f"/root/{agent.relative_to(kata_root)}" in (HERE / "init.sh").read_text()
    fstab = (kata_root / "etc/fstab").read_text()
    assert [line.split()[1] for line in fstab.splitlines()] == ["/tmp", "/var"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\necho lacks libc >&2\nexit 127\n", "exit status 127: lacks libc"),
        ("#!/bin/sh\necho another program\n", "it says 'another program\\n' of its version"),
    ],
)
def test_a_kata_agent_that_does_not_run_in_the_guest_is_refused(
    kata_root: Path, tmp_path: Path, text: str, said: str
) -> None:
    program = tmp_path / "mine"
    program.write_text(text)

    with pytest.raises(BuildError) as refused:
        add_kata_agent(kata_root, program)

    assert str(refused.value).startswith(f"take kata-agent {program}: ")
    assert said in str(refused.value)
