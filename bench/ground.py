"""The base of every measurement: a separate containerd, our programs, and a copy of the guest."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.measures import Ground, write_roots
from integration.framework import direct, images, shim_config
from integration.framework.containerd import Containerd
from integration.framework.daemon import Directories
from integration.framework.leaks import HostState, assert_nothing_left

PROJECT = Path(__file__).resolve().parents[1]
GROUND = Path("/run/pyshim-bench")


@contextmanager
def containerd_up(programs: Sequence[Path] = ()) -> Iterator[Ground]:
    """A running containerd for the time of the measurements, which finds the other shims `programs`.

    Raises AssertionError when they left something on the host.
    """
    GROUND.mkdir()
    binaries = PROJECT / "bin"
    if programs:
        # containerd looks in one directory before its own PATH.
        binaries = GROUND / "bin"
        binaries.mkdir()
        for found in (*(PROJECT / "bin").iterdir(), *programs):
            (binaries / found.name).symlink_to(found.resolve())
    directories = Directories(root=GROUND / "containerd", state=Path("/run/containerd"))
    # As on a node: at level debug every call and every chunk of output would be a line in the log as well.
    daemon = Containerd(directories, binaries=binaries, log_level="info")
    daemon.start()
    try:
        archive = GROUND / "busybox.tar"
        images.write_archive(archive)
        daemon.ctr("images", "import", archive)
        # Its shims' log stays, to show why one failed.
        ours = (GROUND, direct.LOG.parent)
        config = _own_guest()
        warm = _warm(config, "warm")
        (GROUND / "unshared").mkdir()
        unshared = shim_config.variant(GROUND / "unshared", config, shared_fs="none")
        warm_unshared = _warm(config, "warm-unshared", shared_fs="none")
        write_roots(GROUND)
        before = HostState.look(ours)
        yield Ground(
            containerd=daemon,
            directory=GROUND,
            binaries=binaries,
            config=config,
            warm=warm,
            unshared=unshared,
            warm_unshared=warm_unshared,
        )
        assert_nothing_left(before, ours)
    finally:
        daemon.stop()


def _own_guest() -> Path:
    """A configuration with copies of the built guest, so that a build meanwhile changes nothing."""
    shipped = tomllib.loads(shim_config.SHIPPED.read_text())["hypervisor"]["qemu"]
    copies = {
        key: shutil.copy(shim_config.SHIPPED.parent / shipped[key], GROUND) for key in ("kernel", "initrd", "image")
    }
    return shim_config.variant(GROUND, **copies)


def _warm(config: Path, name: str, **changes: object) -> Path:
    """`config` with templates, and its template made."""
    directory = GROUND / name
    directory.mkdir()
    templates = GROUND / "templates"
    path = shim_config.variant(directory, config, enable_template=True, template_path=templates, **changes)
    subprocess.run([PROJECT / "bin" / "pyshim", "factory", "init", "--config", path], check=True, capture_output=True)
    return path
