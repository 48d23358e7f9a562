"""Runs a test container through Docker, with its own client."""

import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from pyshim.model.decoding import damaged, json_value
from pyshim.model.errors import FailedPrecondition, NotFound, Unavailable
from pyshim.node.install.daemon_json import docker_handlers
from pyshim.node.install.handlers import HANDLERS
from pyshim.node.install.running import run_command
from pyshim.start.dialect import RUNTIME

_LISTED_S = 60.0
"""Seconds for dockerd to read its file after a reload, which does not wait for it."""
_RUN_S = 300.0
"""Seconds for the test container. The guest has three minutes to answer, the shipped configuration's dial_timeout."""
_OTHERS = {each.name for each in HANDLERS} - {each.name for each in docker_handlers(HANDLERS)}
_TOP = ("bin", "lib", "lib32", "lib64", "sbin")
"""Names in / that lead into /usr on hosts of today."""


def verify(socket: str, names: Iterable[str], *, has_entries: bool) -> str:
    """Docker ran a container in a virtual machine. Returns its version, and the name of the runtime.

    With `has_entries` that is the first of the handlers `names` that Docker can use, which daemon.json names. Raises
    NotFound without a client, Unavailable, FailedPrecondition with Docker's error text.
    """
    program = shutil.which("docker")
    if program is None:
        raise NotFound("run a test container: there is no program 'docker' (hint: --no-pod)")
    run = partial(_docker, (program, "--host", f"unix://{socket}"))
    version = run("version", "--format", "{{.Server.Version}}").strip()
    usable = [name for name in names if name not in _OTHERS]
    if not usable:
        raise FailedPrecondition("run a test container: Docker can use none of the handlers (hint: --no-pod)")
    name = usable[0] if has_entries else RUNTIME
    major = re.match(r"(\d+)\.", version)
    needed = 24 if has_entries else 23
    if major is not None and int(major[1]) < needed:
        raise FailedPrecondition(f"run a test container: Docker Engine {version} takes no such runtime ({needed} does)")
    if has_entries:
        _await_runtime(run, name)
    _run_container(run, name)
    return f"Docker Engine {version} ran a container with {name}"


def _docker(start: tuple[str, ...], *words: str, limit_s: float = 60.0) -> str:
    return run_command([*start, *words], limit_s)


def _await_runtime(run: Callable[..., str], name: str) -> None:
    deadline = time.monotonic() + _LISTED_S
    refused = damaged("runtimes of Docker", FailedPrecondition)
    while name not in (json_value(run("info", "--format", "{{json .Runtimes}}"), refused) or {}):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"ask Docker for the runtime '{name}': it has none of this name"
                " (hint: 'systemctl reload docker' reads daemon.json, and dockerd's log says what it dislikes)"
            )
        time.sleep(0.2)


def _run_container(run: Callable[..., str], runtime: str) -> None:
    """`true` of the host's own /usr ran, in an image that is made here: no network is needed."""
    image = f"pyshim-verify:{os.getpid()}"
    mounts = ["/usr"]
    with tempfile.TemporaryDirectory() as scratch:
        archive = f"{scratch}/image.tar"
        with tarfile.open(archive, "w") as tar:
            for name in _TOP:
                if os.path.islink(f"/{name}"):
                    tar.add(f"/{name}", name)
                elif os.path.isdir(f"/{name}"):
                    mounts.append(f"/{name}")
        run("import", archive, image)
    try:
        volumes = [word for path in mounts for word in ("--volume", f"{path}:{path}:ro")]
        words = ("--rm", "--pull", "never", "--network", "none", "--runtime", runtime, *volumes)
        run("run", *words, image, shutil.which("true") or "/usr/bin/true", limit_s=_RUN_S)
    finally:
        with suppress(FailedPrecondition):  # of a container that still ends
            run("rmi", "--force", image)
