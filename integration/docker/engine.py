"""One dockerd on the tests' containerd, and `docker` as a user calls it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from integration.framework import images, shim_config
from integration.framework.containerd import Containerd
from integration.framework.ctr import Ctr, Result
from integration.framework.daemon import Directories, Program

IMAGE = "busybox:test"
RUNC, PYSHIM = "runc", "pykata"
"""Names of runtimes; the second is an entry of daemon.json, as an operator makes it."""
BY_PATH = "by-path"
"""An entry that names the shim by `path`, as if it were an OCI runtime."""
POOL = "10.230.16.0/20"
"""Addresses of the networks that `docker network create` makes."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMIT_S = 300.0
TASK_ENDS_S = 8.0
"""More than a container that was told to end after 3 s takes, also in an emulated VM."""


class Docker(Ctr):
    """Calls `docker` on one Engine. A failed call raises with everything that it printed unless `check=False`."""

    def __init__(self, program: Path, socket: Path, environment: Mapping[str, str]) -> None:
        super().__init__(program=program, socket=socket, environment=environment)
        self._start = (str(program), "--host", f"unix://{socket}")

    def __call__(
        self, *words: str | Path, input: bytes | None = None, check: bool = True, within_s: float = _LIMIT_S
    ) -> Result:
        return super().__call__(*words, input=input, check=check, within_s=within_s)

    def inspect(self, name: str, path: str) -> Any:
        """The value at `path` (`.State.ExitCode`) of what `docker inspect` shows."""
        return json.loads(self("inspect", "--format", "{{json " + path + "}}", name).out)


class Engine(Program):
    """dockerd, with live-restore: its containers run on while it is stopped. Its files are in `ground`."""

    def __init__(
        self,
        containerd: Directories,
        packages: Path,
        ground: Path,
        *,
        binaries: str = "/usr/local/bin",
        settings: Path | None = None,
        runtimes: Mapping[str, Any] | None = None,
    ) -> None:
        """`packages` is the root of the unpacked ones, `binaries` the directory of the shim. `settings` is the place of
        daemon.json, and `runtimes` are its runtimes, by default PYSHIM.
        """
        super().__init__("dockerd", ground / "dockerd.log")
        self._program = packages / "usr/sbin/dockerd"
        self._settings = settings or ground / "daemon.json"
        self.tasks_directory = containerd.state / "io.containerd.runtime.v2.task" / "moby"
        """containerd's bundles of this Engine's containers."""
        self._socket = ground / "docker.sock"
        self._environment = {
            "PATH": f"{binaries}:{packages}/usr/sbin:{packages}/usr/bin:{_PATH}",
            "HOME": str(ground / "home"),
            "LANG": "C.UTF-8",
            "DOCKER_RAMDISK": "1",  # the file system of the data may be a tmpfs, where runc cannot pivot_root
        }
        self.docker = Docker(packages / "usr/bin/docker", self._socket, self._environment)
        plugins = ground / "home" / ".docker" / "cli-plugins"
        plugins.mkdir(parents=True)
        for plugin in packages.glob("usr/libexec/docker/cli-plugins/*"):
            (plugins / plugin.name).symlink_to(plugin)
        ours = {"runtimeType": "io.containerd.pykata.v2", "options": {"ConfigPath": str(shim_config.SHIPPED)}}
        by_path = {"path": f"{binaries}/containerd-shim-pykata-v2"}
        text = {
            "data-root": str(ground / "data"),
            "exec-root": str(ground / "exec"),
            "pidfile": str(ground / "docker.pid"),
            "hosts": [f"unix://{self._socket}"],
            "containerd": str(containerd.socket),
            "live-restore": True,
            "debug": True,
            "init-path": str(packages / "usr/bin/tini-static"),
            "userland-proxy-path": str(packages / "usr/sbin/docker-proxy"),
            "bip": "10.230.0.1/24",
            "default-address-pools": [{"base": POOL, "size": 24}],
            "runtimes": {PYSHIM: ours, BY_PATH: by_path} if runtimes is None else dict(runtimes),
        }
        self._settings.write_text(json.dumps(text))

    def start(self) -> None:
        self._run([self._program, "--config-file", self._settings], environment=self._environment)

    def wait_for_tasks_end(self) -> None:
        """No process of a container is left, while dockerd is down: its init has ended and its shim knows."""
        time.sleep(TASK_ENDS_S)

    def is_ready(self) -> bool:
        return self._socket.exists() and self.docker("version", check=False).code == 0


@contextlib.contextmanager
def engine(daemon: Containerd, packages: Path, ground: Path) -> Iterator[Engine]:
    """A dockerd with the test image; at the end its containers and networks are removed, and it has ended."""
    ground.mkdir()
    binaries = daemon.ctr.environment["PATH"].split(":")[0]
    with Engine(daemon.directories, packages, ground, binaries=binaries) as made:
        rootfs = images.unpack_rootfs(ground / "rootfs")
        archive = subprocess.run(["tar", "-C", rootfs, "-c", "."], check=True, capture_output=True).stdout
        settings = ("-c", 'CMD ["/bin/sh"]', "-c", "ENV PATH=/bin:/sbin:/usr/bin:/usr/sbin")
        made.docker("import", *settings, "-", IMAGE, input=archive)
        try:
            yield made
        finally:
            for container in made.docker("ps", "--all", "--quiet", check=False).lines:
                made.docker("rm", "--force", "--volumes", container, check=False)
            made.docker("network", "prune", "--force", check=False)
            made.docker("volume", "prune", "--all", "--force", check=False)
    remove_furniture(ground)


def remove_furniture(ground: Path) -> None:
    """What dockerd makes once on a host and leaves is gone: its bridge, its name for the host's network namespace, its
    cgroups and directory, when they are empty.
    """
    subprocess.run(["ip", "link", "delete", "docker0"], check=False, capture_output=True)
    subprocess.run(["umount", ground / "exec" / "netns" / "default"], check=False, capture_output=True)
    for cgroup in (*Path("/sys/fs/cgroup").glob("*/docker"), Path("/sys/fs/cgroup/docker")):
        with contextlib.suppress(OSError):
            cgroup.rmdir()
    for directory in ("/run/docker/plugins", "/run/docker"):
        with contextlib.suppress(OSError):
            Path(directory).rmdir()
