"""`fio` on what a container can be given as storage, and on the host's file system below: the same jobs, in turn.

Two VMs run at the same time, since a sandbox has one disk driver: one has the share, two virtio-blk disks and a tmpfs,
the other a virtio-scsi disk. fio and its libraries are the host's, shared read-only. The files, and the images behind
the disks, lie in one directory of the host. Jobs are synchronous with one request at a time: what is measured is mostly
the way there.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import measures
from bench.measures import MIB, PYKATA, Ground
from integration.framework import erofs, images

FIO = Path("/usr/bin/fio")
# The mode of fio, its block size, and True for a rate in operations (in MB otherwise).
JOBS = {"read": ("1m", False), "write": ("1m", False), "randread": ("4k", True), "randwrite": ("4k", True)}
FILE_MIB = 64
_IMAGE_MIB = 128
_LIMIT_S = 60
_CONTAINER_SEES = tuple(path for path in ("/usr", "/lib", "/lib64") if Path(path).is_dir())


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory for jobs: in the VM with the disk driver `vm`, or on the host if that is empty."""

    name: str
    title: str
    vm: str
    directory: str
    direct: bool = True
    """O_DIRECT"""
    read_only: bool = False

    @property
    def jobs(self) -> tuple[str, ...]:
        return tuple(job for job in JOBS if not (self.read_only and job.endswith("write")))


HOST = Place(name="host", title="host, O_DIRECT", vm="", directory="")
PLACES = (
    HOST,
    Place(name="cached", title="host, page cache", vm="", directory="", direct=False),
    Place(name="share", title="virtio-fs", vm="virtio-blk", directory="/share"),
    Place(name="blk", title="virtio-blk", vm="virtio-blk", directory="/disk"),
    Place(name="scsi", title="virtio-scsi", vm="virtio-scsi", directory="/disk"),
    Place(name="layer", title="EROFS on virtio-blk", vm="virtio-blk", directory="/layer", read_only=True),
    # A tmpfs has O_DIRECT since Linux 6.6.
    Place(name="memory", title="guest's tmpfs", vm="virtio-blk", directory="/memory", direct=False),
)


def fio_argv(places: Sequence[Place], runtime_ms: int) -> list[str]:
    """All jobs one after the other, on one file a place, which fio makes when it is not there; the report is on stdout.

    One fio for several places, since its 60 libraries take an emulated machine seconds to load.
    """
    argv = [str(FIO), "--output-format=json", "--eta=never", "--disk_util=0", "--clocksource=clock_gettime"]
    argv += [f"--size={FILE_MIB}m", "--ioengine=psync", "--thread", "--norandommap"]
    # The host's page cache stays filled, as it does for what virtiofsd and QEMU read.
    argv += ["--invalidate=0"]
    argv += ["--time_based", f"--runtime={runtime_ms}ms"]
    for place in places:
        for job in place.jobs:
            argv += [f"--name={place.name}-{job}", f"--filename={place.directory}/data-{place.name}"]
            argv += [f"--direct={int(place.direct)}", f"--rw={job}", f"--bs={JOBS[job][0]}", "--stonewall"]
    return argv


def rates(report: str, places: Sequence[Place]) -> dict[str, dict[str, float]]:
    """The rate of each job of each place, in MB/s (10^6 bytes) or operations a second as `JOBS` says, of a fio report.

    Raises ValueError for a text that is not a report, and for one in which a job is missing, failed or did nothing.
    """
    try:
        # fio puts its remarks before the object.
        found = {job["jobname"]: job for job in json.loads(report[report.index("{") :])["jobs"]}
        return {place.name: {job: _rate(found[f"{place.name}-{job}"], job) for job in place.jobs} for place in places}
    except (KeyError, TypeError) as error:
        raise ValueError(f"read fio's report: no {error} in it") from error
    except ValueError as error:
        raise ValueError(f"read fio's report: {error}") from error


def _rate(report: dict[str, Any], job: str) -> float:
    if report["error"] != 0:
        raise ValueError(f"job {report['jobname']!r} failed: error {report['error']}")
    done = report["read" if job.endswith("read") else "write"]
    if done["total_ios"] == 0:
        raise ValueError(f"job {report['jobname']!r} did nothing")
    _, in_operations = JOBS[job]
    return float(done["iops"]) if in_operations else done["bw_bytes"] / 1e6


def sample(ground: Ground, below: Path, rounds: int, runtime_ms: int) -> Iterator[dict[str, dict[str, float]]]:
    """For each round, the rates of every place; files and VMs live in between, below a new directory of `below`."""
    with ExitStack() as end:
        directory = Path(end.enter_context(tempfile.TemporaryDirectory(prefix="file-io-", dir=below)))
        on_host = [replace(place, directory=str(directory)) for place in PLACES if not place.vm]
        pods = {vm: end.enter_context(_container(ground, vm, directory)) for vm in ("virtio-blk", "virtio-scsi")}
        for _ in range(rounds):
            found = rates(_run_on_host(fio_argv(on_host, runtime_ms)), on_host)
            for driver, container in pods.items():
                inside = [place for place in PLACES if place.vm == driver]
                found |= rates(measures.exec_out(ground, container, *fio_argv(inside, runtime_ms)), inside)
            yield found


def _run_on_host(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"run fio on the host: code {done.returncode}, {done.stderr[-2000:]!r}")
    return done.stdout


@contextmanager
def _container(ground: Ground, driver: str, directory: Path) -> Iterator[str]:
    """A container with a share of the host, an ext4 on a disk of `driver` and a tmpfs."""
    home = directory / driver
    share, image, config = home / "share", home / "disk.img", home / "configuration.toml"
    share.mkdir(parents=True)
    with image.open("wb") as file:
        # Whole, as the file on the host is: no block is looked for while fio measures.
        file.write(bytes(_IMAGE_MIB * MIB))
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "nodiscard", image], check=True, timeout=_LIMIT_S)
    section = "[hypervisor.qemu]\n"
    config.write_text(ground.config.read_text().replace(section, f'{section}block_device_driver = "{driver}"\n', 1))
    mounts = [f"type=bind,src={path},dst={path},options=rbind:ro" for path in _CONTAINER_SEES]
    mounts += [f"type=bind,src={share},dst=/share,options=rbind:rw", f"type=ext4,src={image},dst=/disk,options=loop:rw"]
    mounts.append(f"type=erofs,src={_layer(home)},dst=/layer,options=loop:ro")
    mounts.append(f"type=tmpfs,src=tmpfs,dst=/memory,options=size={_IMAGE_MIB}m")
    words = [word for mount in mounts for word in ("--mount", mount)]
    with measures.container(replace(ground, config=config), PYKATA, *words) as name:
        yield name


def _layer(home: Path) -> Path:
    """An EROFS file like that of an image's layer, with the file that the jobs read."""
    content = images.layer({"data-layer": os.urandom(FILE_MIB * MIB)}, mode=0o644)
    (layer,) = erofs.layer_files(home / "layers", [content])
    return layer
