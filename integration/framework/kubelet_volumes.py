"""Volumes as the kubelet lays them out: payload volumes that are swapped atomically, emptyDirs, subPaths."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from protos.cri import v1_pb2 as pb

_versions = itertools.count(1)


def volume(
    host_path: Path,
    container_path: str,
    *,
    readonly: bool = False,
    propagation: pb.MountPropagation = pb.PROPAGATION_PRIVATE,
) -> pb.Mount:
    """The mount by which a container has a volume at `container_path`."""
    return pb.Mount(host_path=str(host_path), container_path=container_path, readonly=readonly, propagation=propagation)


class PodDirectory:
    """`<root>/pods/<uid>` of one pod."""

    def __init__(self, root: Path, uid: str = "0b1c") -> None:
        self.path = root / "pods" / uid
        self.path.mkdir(parents=True)
        self._mounted: list[Path] = []

    def payload(self, plugin: str, name: str) -> Payload:
        """`plugin` is configmap, secret, projected or downward-api."""
        return Payload(self.path / "volumes" / f"kubernetes.io~{plugin}" / name)

    def empty_dir(self, name: str, *, memory: str = "", hugepages: str = "", gid: int = 0) -> Path:
        """`memory` is a tmpfs's size, `hugepages` a hugetlbfs's options; neither: a directory on disk."""
        path = self.path / "volumes" / "kubernetes.io~empty-dir" / name
        path.mkdir(parents=True)
        if memory:
            self._mount("-t", "tmpfs", "-o", f"size={memory},mode=0777", "tmpfs", path)
        elif hugepages:
            self._mount("-t", "hugetlbfs", "-o", hugepages, "nodev", path)
        path.chmod(0o777)
        if gid:
            shutil.chown(path, group=gid)
            path.chmod(0o2777)
        return path

    def sub_path(self, volume: str, directory: Path) -> Path:
        """The kubelet's bind for a subPath: `directory`, opened safely, at a path of its own."""
        path = self.path / "volume-subpaths" / volume / "container" / "0"
        path.mkdir(parents=True)
        self._mount("--bind", directory, path)
        return path

    def _mount(self, *words: str | Path) -> None:
        subprocess.run(["mount", *map(str, words)], check=True)
        self._mounted.append(Path(words[-1]))

    def remove(self) -> None:
        while self._mounted:
            subprocess.run(["umount", str(self._mounted.pop())], check=True)
        shutil.rmtree(self.path)


class Payload:
    """A ConfigMap's or Secret's files: real ones in a directory named after the version, `..data` pointing at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)

    def write(self, files: Mapping[str, str]) -> None:
        """The volume holds exactly `files`, swapped in by one rename as Kubernetes' atomic writer does it."""
        old = self.path / "..data"
        before = self.path / old.readlink() if old.is_symlink() else None
        version = self.path / f"..2026_01_01_00_00_00.{next(_versions)}"
        version.mkdir(mode=0o755)
        for name, text in files.items():
            (version / name).write_text(text)
        temporary = self.path / "..data_tmp"
        temporary.symlink_to(version.name)
        temporary.rename(old)
        for name in files:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        for link in [entry for entry in self.path.iterdir() if not entry.name.startswith("..")]:
            if link.name not in files:
                link.unlink()
        if before is not None:
            shutil.rmtree(before)
