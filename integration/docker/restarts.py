"""dockerd stopped and started again, with live-restore, in every phase of a container's life."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from integration.framework.waiting import eventually

from .engine import IMAGE, Engine
from .verbs import Scene, shown

_PAUSE = ("sh", "-c", "echo ready; sleep 1000")


def _created(engine: Engine, scene: Scene) -> str:
    name = scene.named("created")
    scene.docker("create", "--runtime", scene.runtime, "--name", name, IMAGE, "sh", "-c", "ls /sys/class/net; exit 6")
    engine.restart()
    scene.docker("start", name)
    return f"{scene.ended(name)} {' '.join(scene.docker('logs', name).lines)}"


def _starting(engine: Engine, scene: Scene) -> str:
    """Killed while the container is made: Docker knows it as failed or runs it, and it can be removed either way."""
    name = scene.named("starting")
    scene.docker("create", "--runtime", scene.runtime, "--name", name, IMAGE, *_PAUSE)
    starting = threading.Thread(target=lambda: scene.docker("start", name, check=False))
    starting.start()
    eventually(lambda: _has_task(engine), what="containerd has the task's directory")
    engine.restart(signal.SIGKILL)
    starting.join()
    state = eventually(lambda: scene.docker.inspect(name, ".State.Status"), what="the container's state")
    scene.docker("rm", "--force", name)
    return "known and removed" if state in ("created", "exited", "running") else str(state)


def _has_task(engine: Engine) -> bool:
    bundles = engine.tasks_directory
    return bundles.exists() and any(bundles.iterdir())


def _running(engine: Engine, scene: Scene) -> str:
    name = scene.start("lives", IMAGE, *_PAUSE)
    scene.said(name, "ready")
    engine.restart(signal.SIGKILL)
    found = shown(scene.exec(name, "echo", "again"))
    scene.docker("network", "connect", _network(scene), name)
    eventually(lambda: "eth1" in scene.links(name), what="the interface that came later", every_s=0.5)
    scene.docker("stop", "--time", "1", name)
    return f"{found}, eth1, {scene.ended(name)}"


def _network(scene: Scene) -> str:
    name = scene.named("late")
    scene.docker("network", "create", name)
    return name


def _paused(engine: Engine, scene: Scene) -> str:
    name = scene.start("paused", IMAGE, *_PAUSE)
    scene.docker("pause", name)
    engine.restart()
    state = scene.docker.inspect(name, ".State.Status")
    scene.docker("unpause", name)
    return f"{state}, {shown(scene.exec(name, 'echo', 'again'))}"


def _ends_meanwhile(engine: Engine, scene: Scene) -> str:
    name = scene.start("ends", IMAGE, "sh", "-c", "echo ready; sleep 3; exit 7")
    scene.said(name, "ready")
    engine.stop(signal.SIGKILL)
    engine.wait_for_tasks_end()
    engine.start()
    return scene.ended(name)


PHASES: dict[str, Callable[[Engine, Scene], str]] = {
    "created, not started": _created,
    "killed while it starts": _starting,
    "killed while it runs": _running,
    "paused": _paused,
    "it ends while dockerd is down": _ends_meanwhile,
}
