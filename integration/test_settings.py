"""The settings of a spec for the process and its surroundings: user, directory, environment, capabilities, mounts,
devices, names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .framework import oci
from .framework.ctr import Ctr, Result
from .framework.images import IMAGE
from .framework.runtime import Runtime

Script = Callable[[str], Result]


@pytest.fixture(scope="module")
def directories(ctr: Ctr) -> tuple[Path, Path]:
    """A read-write and a read-only directory of the host, each with a file."""
    base = Path("/run/pyshim-integration/volumes")
    for kind in ("rw", "ro"):
        (base / kind).mkdir(parents=True)
        (base / kind / "file").write_text(f"from the host, {kind}\n")
    (base / "single").write_text("a single file\n")
    return base / "rw", base / "ro"


@pytest.fixture(scope="module")
def furnished(ctr: Ctr, runtime: Runtime, directories: tuple[Path, Path], module_leaves_nothing: None) -> Iterator[str]:
    """A container with a read-only root, bind mounts, a device, a tmpfs, environment and directory, shared by this
    file.
    """
    name = "furnished"
    writable, readonly = directories
    options = [
        *("--read-only", "--cwd", "/usr", "--env", "COLOUR=blue", "--env", "EMPTY="),
        *("--mount", f"type=bind,src={writable},dst=/volumes/rw,options=rbind:rw"),
        *("--mount", f"type=bind,src={readonly},dst=/volumes/ro,options=rbind:ro"),
        *("--mount", f"type=bind,src={writable.parent}/single,dst=/etc/single,options=bind:ro"),
        *("--mount", "type=tmpfs,src=tmpfs,dst=/scratch,options=size=1m"),
        *("--device", "/dev/fuse", "--cap-add", "CAP_SYS_NICE", "--cap-drop", "CAP_CHOWN"),
    ]
    ctr("run", "--detach", "--runtime", runtime.name, *options, IMAGE, name, "sleep", "100000")
    try:
        yield name
    finally:
        ctr.remove([name])


@pytest.fixture
def inside(ctr: Ctr, furnished: str) -> Script:
    """Runs a shell script in the furnished container."""

    def run(script: str) -> Result:
        return ctr("task", "exec", "--exec-id", "inside", furnished, "sh", "-c", script, check=False)

    return run


def test_environment_and_directory_are_the_specs(inside: Script) -> None:
    result = inside("tr '\\0' '\\n' < /proc/1/environ; readlink /proc/1/cwd; pwd; echo $COLOUR")

    assert "COLOUR=blue" in result.lines
    assert "EMPTY=" in result.lines
    assert result.lines[-3:] == ["/usr", "/usr", "blue"]


def test_added_and_dropped_capabilities_are_in_effect(inside: Script) -> None:
    effective = int(inside("sed -n 's/^CapEff:.//p' /proc/1/status").out, 16)

    assert effective & 1 << 23, "CAP_SYS_NICE was added"
    assert not effective & 1 << 0, "CAP_CHOWN was dropped"
    assert not effective & 1 << 21, "CAP_SYS_ADMIN was never asked for"


def test_read_only_root_refuses_writes(inside: Script) -> None:
    result = inside("touch /new")

    assert result.code != 0
    assert "Read-only file system" in result.err


def test_read_write_bind_mount_carries_changes_both_ways(inside: Script, directories: tuple[Path, Path]) -> None:
    writable, _ = directories

    assert inside("cat /volumes/rw/file; echo from the container > /volumes/rw/answer").out == "from the host, rw\n"
    assert (writable / "answer").read_text() == "from the container\n"
    (writable / "later").write_text("written later\n")
    assert inside("cat /volumes/rw/later").out == "written later\n"


def test_read_only_bind_mount_can_be_read_but_not_written(inside: Script, directories: tuple[Path, Path]) -> None:
    result = inside("cat /volumes/ro/file; touch /volumes/ro/new")

    assert result.out == "from the host, ro\n"
    assert "Read-only file system" in result.err
    assert not (directories[1] / "new").exists()


def test_single_file_can_be_mounted(inside: Script) -> None:
    result = inside("cat /etc/single; echo x > /etc/single")

    assert result.out == "a single file\n"
    assert result.code != 0


def test_tmpfs_mount_has_the_size_it_was_given(inside: Script) -> None:
    result = inside("df -k /scratch | tail -1; head -c 2000000 /dev/zero > /scratch/big")

    assert result.out.split()[1] == "1024"
    assert result.code != 0


def test_device_is_there_with_its_numbers(inside: Script) -> None:
    assert inside("stat -c '%F %t:%T' /dev/fuse").out == "character special file a:e5\n"


def test_default_devices_are_there(inside: Script) -> None:
    result = inside(
        "for d in null zero full random urandom tty; do test -c /dev/$d || echo no $d; done; echo lost > /dev/null"
    )

    assert (result.code, result.out) == (0, "")


def test_device_that_was_not_given_cannot_be_opened(inside: Script) -> None:
    # Making the node is refused, or opening what was made.
    result = inside("mknod /dev/kmsg c 1 11 && head -c 1 /dev/kmsg")

    assert result.code != 0


def _configured(ctr: Ctr, runtime: Runtime, name: str, config: oci.Spec, scratch: Path) -> Result:
    path = oci.write(config, scratch)
    return ctr("run", "--rm", "--runtime", runtime.name, "--config", path, name, check=False)


def test_spec_decides_hostname_user_groups_limits_and_directory(
    ctr: Ctr, runtime: Runtime, name: str, plain_rootfs: Path, scratch: Path
) -> None:
    script = "hostname; id -u; id -g; id -G; ulimit -n; pwd; cat /proc/self/oom_score_adj"
    config = oci.spec("sh", "-c", script, name=name, rootfs=plain_rootfs)
    config["hostname"] = "chosen-name"
    config["process"] |= {
        "user": {"uid": 1000, "gid": 50, "additionalGids": [7, 8]},
        "cwd": "/var",
        "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 321, "hard": 432}],
        "oomScoreAdj": 123,
    }

    result = _configured(ctr, runtime, name, config, scratch)

    assert result.code == 0, result
    assert result.lines == ["chosen-name", "1000", "50", "50 7 8", "321", "/var", "123"]


def test_spec_decides_sysctl_masked_and_read_only_paths(
    ctr: Ctr, runtime: Runtime, name: str, plain_rootfs: Path, scratch: Path
) -> None:
    script = "cat /proc/sys/kernel/shm_rmid_forced; wc -c < /proc/keys; echo 1 > /proc/sys/kernel/shm_rmid_forced"
    config = oci.spec("sh", "-c", script, name=name, rootfs=plain_rootfs)
    config["linux"]["sysctl"] = {"kernel.shm_rmid_forced": "1"}

    result = _configured(ctr, runtime, name, config, scratch)

    assert result.lines == ["1", "0"]
    assert "Read-only file system" in result.err


def test_seccomp_profile_of_the_spec_is_enforced(
    ctr: Ctr, runtime: Runtime, name: str, plain_rootfs: Path, scratch: Path
) -> None:
    config = oci.spec("sh", "-c", "mkdir /tmp/refused; echo $?", name=name, rootfs=plain_rootfs)
    refused = {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}
    architectures = ["SCMP_ARCH_X86_64"]
    config["linux"]["seccomp"] = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": architectures,
        "syscalls": [refused],
    }

    result = _configured(ctr, runtime, name, config, scratch)

    assert "Operation not permitted" in result.err
    assert result.out == "1\n"


def test_memory_limit_of_the_spec_is_enforced(
    ctr: Ctr, runtime: Runtime, name: str, plain_rootfs: Path, scratch: Path
) -> None:
    # tail keeps what it reads: 64 MiB do not fit in 16.
    config = oci.spec("sh", "-c", "head -c 67108864 /dev/zero | tail", name=name, rootfs=plain_rootfs)
    config["linux"]["resources"]["memory"] = {"limit": 16 * 1024 * 1024, "swap": 16 * 1024 * 1024}

    result = _configured(ctr, runtime, name, config, scratch)

    assert result.code == 137
