"""`docker compose up` and `down`, repeated: every service finds the others by name, and nothing is left on the host."""

from __future__ import annotations

import json
from pathlib import Path

from integration.framework.leaks import HostState, assert_nothing_left
from integration.framework.waiting import eventually

from .engine import IMAGE, Docker

_SERVE = "echo {name} > /index.html; exec httpd -f -p 80"
_ASK = "until wget -qO- http://web/ && wget -qO- http://store/; do sleep 1; done; echo asked; sleep 1000"


def project(directory: Path, runtime: str) -> Path:
    """Three services on two networks: `client` is on both, and starts when `web` is healthy."""
    health = {"test": ["CMD", "wget", "-qO-", "http://127.0.0.1/"], "interval": "2s", "timeout": "60s", "retries": 30}
    common = {"image": IMAGE, "runtime": runtime, "init": True, "stop_grace_period": "2s"}
    services = {
        "web": {
            **common,
            "command": ["sh", "-c", _SERVE.format(name="web")],
            "networks": ["front"],
            "healthcheck": health,
        },
        "store": {
            **common,
            "command": ["sh", "-c", _SERVE.format(name="store")],
            "networks": ["back"],
            "volumes": ["data:/data"],
        },
        "client": {
            **common,
            "command": ["sh", "-c", _ASK],
            "networks": ["front", "back"],
            "depends_on": {"web": {"condition": "service_healthy"}, "store": {"condition": "service_started"}},
        },
    }
    path = directory / f"compose-{runtime}.yaml"  # JSON is YAML
    path.write_text(json.dumps({"services": services, "networks": {"front": {}, "back": {}}, "volumes": {"data": {}}}))
    return path


def run_rounds(docker: Docker, directory: Path, runtime: str, rounds: int, ground: Path) -> None:
    """`rounds` times up, asked, and down. Raises AssertionError for a service that is not reached, or for leftovers."""
    words = ("compose", "--project-name", f"{runtime}-round", "--file", project(directory, runtime))
    before: HostState | None = None
    for number in range(1, rounds + 1):
        docker(*words, "up", "--detach", "--quiet-pull", within_s=900)
        eventually(
            lambda: "asked" in docker(*words, "logs", "client").out,
            what=lambda: f"the client reaches both: {docker(*words, 'logs').out[-2000:]}",
            within_s=300,
            every_s=0.5,
        )
        docker(*words, "down", "--volumes", within_s=300)
        if before is None:
            before = HostState.look((ground,))  # the Engine keeps directories and chains from its first network on
        assert_nothing_left(before, (ground,))
        print(f"  compose up and down, round {number} of {rounds}: nothing left", flush=True)
