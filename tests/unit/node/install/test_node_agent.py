"""A node of a cluster: what its object says after which step, and what is left when a step fails.

The API server is a fake that speaks TLS; the node is a directory, on which a script plays
`pyshim` and the payload's `install`.
"""

import asyncio
import datetime
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, NotFound, ShimError, Unavailable
from pyshim.node.cli.command import run
from pyshim.node.install.in_cluster.agent import NodeAgent, NodeAgentConfig, Pauses, wait_removed
from pyshim.node.install.in_cluster.payload import NodeHost, require_payload
from pyshim.node.install.in_cluster.plan import (
    MESSAGE,
    OLDER_PODS,
    RELEASE,
    STATE,
    NodeReport,
    State,
    report_of,
    report_patch,
)
from pyshim.node.kubernetes.api import Access, Api, in_cluster
from tests.fakes.api_server import FakeApiServer
from tests.fakes.self_signed import self_signed

ROOT = Path(__file__).resolve().parents[4]
TAINT = "pyshim.io/not-ready"
TAINTS = [{"key": "other", "effect": "NoSchedule"}, {"key": TAINT, "effect": "NoSchedule"}]
CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
QUICK = Pauses(first_retry_s=0.05, longest_retry_s=0.1, check_s=0.01, status_s=0.05, removal_retry_s=0.05)
GENEROUS_S = 60.0
# Plays every command of the host. A file on-VERB replaces what a verb does.
_HOST = """\
#!/bin/sh
root={root}
case "$*" in
    *"/payload/install "*) verb=install ;;
    *"/pyshim "*) verb=$2 ;;
    *) verb=other ;;
esac
echo $verb $* >>$root/log
[ ! -e $root/on-$verb ] || . $root/on-$verb
case $verb in
    install) mkdir -p $root/opt/pyshim/bin && touch $root/opt/pyshim/bin/pyshim && echo "release 0.1.0-new" ;;
    uninstall) rm -r $root/opt/pyshim ;;
    status) cat $root/status.json ;;
    check) cat $root/check.json; exit 1 ;;
esac
"""


class Node:
    """A node's directory, its object, and the agent on it."""

    def __init__(self, root: Path, server: FakeApiServer, name: str = "n1") -> None:
        self.name = name
        self.root = root / "node"
        self.payload = root / "payload"
        self.server = server
        (self.root / "var" / "lib").mkdir(parents=True)
        self.payload.mkdir()
        for name in ("install", "release.json"):
            (self.payload / name).touch()
        self.script = root / "host"
        self.script.write_text(_HOST.format(root=self.root))
        self.script.chmod(0o755)
        self.wish, self.ready = root / "remove", root / "ready"
        self.status()
        (self.root / "check.json").write_text('{"verdicts": []}')

    def on(self, verb: str, script: str) -> None:
        aside = self.root / "aside"
        aside.write_text(script)
        aside.rename(self.root / f"on-{verb}")

    def status(self, pods: dict[str, list[str]] | None = None, files: dict[str, str] | None = None) -> None:
        document = {
            "release": "0.1.0-new",
            "handlers": ["pykata", "pykata-debug"],
            "pods": pods or {},
            "files": files or {},
        }
        aside = self.root / "aside"
        aside.write_text(json.dumps(document))
        aside.rename(self.root / "status.json")

    def verbs(self) -> list[str]:
        """In the order in which they were called."""
        log = (self.root / "log").read_text() if (self.root / "log").exists() else ""
        return [line.split()[0] for line in log.splitlines() if not line.startswith("other ")]

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.server.nodes["n1"]["metadata"]["labels"]
        return {key: text for key, text in labels.items() if key.startswith("pyshim.io/")}

    @property
    def notes(self) -> dict[str, str]:
        found: dict[str, str] = self.server.nodes["n1"]["metadata"].get("annotations", {})
        return found

    @property
    def taints(self) -> list[str]:
        return [taint["key"] for taint in self.server.nodes["n1"]["spec"].get("taints") or []]

    handlers: tuple[str, ...] = ("pykata", "pykata-debug")

    def agent(self, api: Api, pauses: Pauses = QUICK) -> NodeAgent:
        config = NodeAgentConfig(
            node=self.name,
            payload=str(self.payload),
            handlers=self.handlers,
            taint=TAINT,
            remove_when=str(self.wish),
            ready_file=str(self.ready),
            containerd_config="/etc/containerd/config.toml",
            kind="k3s",
            socket="/run/containerd/containerd.sock",
            sandboxer="shim",
            snapshotter="erofs",
            python="/usr/bin/python3",
        )
        return NodeAgent(config, api=api, host=NodeHost(enter=(str(self.script),), root=str(self.root)), pauses=pauses)

    @asynccontextmanager
    async def running(self, access: Access, pauses: Pauses = QUICK) -> AsyncIterator[None]:
        """The agent runs for the block, and has not failed by itself."""
        async with Api(access) as api:
            task = asyncio.ensure_future(self.agent(api, pauses).run())
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(GENEROUS_S):
        while not condition():  # noqa: ASYNC110 - the agent's process and files send no event
            await asyncio.sleep(0.01)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node that has a taint of ours and one of others."""
    server = FakeApiServer()
    server.add_node("n1", taints=TAINTS)
    node = Node(tmp_path, server)
    yield node
    assert not [name for name in os.listdir(node.root / "var" / "lib") if name.startswith("pyshim-install-")]


@pytest.fixture
def access(node: Node, runner: asyncio.Runner, tmp_path: Path) -> Iterator[Access]:
    end = AsyncExitStack()
    yield runner.run(end.enter_async_context(node.server.serving(tmp_path)))
    runner.run(end.aclose())


async def settled(node: Node, access: Access) -> None:
    node.ready.unlink(missing_ok=True)
    async with node.running(access):
        await until(node.ready.exists)


async def test_a_node_is_labelled_after_its_test_pods_and_loses_the_taint_last(node: Node, access: Access) -> None:
    await settled(node, access)

    assert node.verbs() == ["install", "status", "verify", "verify"]
    first, second, last = node.server.patches
    assert first["metadata"]["labels"] == {STATE: "installing"}
    assert second["metadata"]["labels"] == {
        STATE: "ready",
        "pyshim.io/pykata": "true",
        "pyshim.io/pykata-debug": "true",
    }
    assert last["spec"]["taints"] == TAINTS[:1]
    assert node.notes == {RELEASE: "0.1.0-new"}
    assert node.server.nodes["n1"]["metadata"]["labels"]["kubernetes.io/hostname"] == "n1"


async def test_install_gets_the_payload_the_handlers_and_the_places(node: Node, access: Access) -> None:
    await settled(node, access)

    (line,) = [each for each in (node.root / "log").read_text().splitlines() if each.startswith("install ")]
    assert "--handler pykata --handler pykata-debug" in line
    places = "--kind=k3s --socket=/run/containerd/containerd.sock"
    assert f"--containerd-config=/etc/containerd/config.toml --sandboxer=shim --snapshotter=erofs {places}" in line
    assert re.search(r"/usr/bin/python3 -I /var/lib/pyshim-install-\w+/payload/install --restart --downgrade ", line)


async def test_a_class_of_ones_own_gets_its_settings_and_its_label(tmp_path: Path, node: Node, access: Access) -> None:
    settings = tmp_path / "gpu.toml"
    settings.write_text("[hypervisor.qemu]\n")

    node.handlers = ("pykata", f"gpu:pykata={settings}")
    (node.root / "status.json").write_text('{"release": "r", "handlers": ["pykata", "gpu"], "files": {}}')
    node.on("install", "find $root/var/lib -name gpu.toml > $root/copied")
    await settled(node, access)

    (line,) = [each for each in (node.root / "log").read_text().splitlines() if each.startswith("install ")]
    stage = line.partition(" -I ")[2].partition("/payload/")[0]
    assert f"--handler pykata --handler gpu:pykata={stage}/gpu.toml" in line
    assert (node.root / "copied").read_text().strip() == f"{node.root}{stage}/gpu.toml"
    assert node.labels == {STATE: "ready", "pyshim.io/pykata": "true", "pyshim.io/gpu": "true"}


async def test_a_failed_installation_leaves_the_taint_says_why_and_is_tried_again(node: Node, access: Access) -> None:
    node.on("install", "echo 'pyshim: install pyshim: this node lacks QEMU' >&2; exit 1")
    async with node.running(access):
        await until(lambda: node.labels.get(STATE) == "failed")
        assert "this node lacks QEMU" in node.notes[MESSAGE]
        assert node.labels == {STATE: "failed"}
        assert (TAINT in node.taints, node.ready.exists()) == (True, False)
        node.on("install", "")
        await until(node.ready.exists)

    assert (node.labels[STATE], node.labels["pyshim.io/pykata"], node.taints) == ("ready", "true", ["other"])
    assert MESSAGE not in node.notes


@pytest.mark.parametrize(
    ("broken", "state", "left"), [("pykata-debug", "ready", "pykata"), ("pykata", "failed", "pykata-debug")]
)
async def test_a_handler_whose_test_pod_fails_has_no_label(
    broken: str, state: str, left: str, node: Node, access: Access
) -> None:
    node.on("verify", f'case "$*" in *"--handler {broken}") echo "no such guest" >&2; exit 1;; esac')
    async with node.running(access):
        await until(lambda: node.labels.get(STATE) == state and (state == "failed" or node.ready.exists()))
        assert node.labels == {STATE: state, f"pyshim.io/{left}": "true"}
        assert f"{broken}: " in node.notes[MESSAGE]
        assert "no such guest" in node.notes[MESSAGE]
        assert (TAINT in node.taints) == (state == "failed")


@pytest.mark.parametrize("works", [True, False])
async def test_an_upgrade_that_fails_keeps_the_label_of_what_still_runs_pods(
    works: bool, node: Node, access: Access
) -> None:
    await settled(node, access)
    node.on("install", "exit 1")
    node.on("verify", "" if works else "exit 1")
    async with node.running(access):
        await until(lambda: node.labels.get(STATE) == "failed")

    assert node.labels.get("pyshim.io/pykata") == ("true" if works else None)


async def test_the_labels_stay_during_an_upgrade(node: Node, access: Access) -> None:
    await settled(node, access)
    node.server.patches.clear()
    await settled(node, access)

    assert [patch["metadata"]["labels"] for patch in node.server.patches] == [{STATE: "installing"}, {STATE: "ready"}]


async def test_pods_of_an_earlier_release_are_named_until_they_end_and_then_it_is_removed(
    node: Node, access: Access
) -> None:
    node.status(pods={"0.1.0-old": ["shop/web-0", "shop/web-1"], "0.1.0-new": ["shop/new"]})
    async with node.running(access):
        await until(node.ready.exists)
        assert node.notes[OLDER_PODS] == "shop/web-0,shop/web-1"
        node.status(pods={"0.1.0-old": ["shop/web-1"]})
        await until(lambda: node.notes[OLDER_PODS] == "shop/web-1")
        node.status()
        await until(lambda: node.verbs().count("install") == 2)

    assert OLDER_PODS not in node.notes


async def test_a_file_that_was_edited_later_is_reported(node: Node, access: Access) -> None:
    async with node.running(access):
        await until(node.ready.exists)
        node.status(files={"/etc/pyshim/configuration.toml": "edited", "/opt/pyshim/bin/pyshim": "ok"})
        await until(lambda: MESSAGE in node.notes)

    assert node.notes[MESSAGE] == "not as installed: /etc/pyshim/configuration.toml"


async def test_a_class_whose_overhead_does_not_fit_is_reported(node: Node, access: Access) -> None:
    node.server.classes["pykata"] = {"kind": "RuntimeClass", "metadata": {"name": "pykata"}}
    verdicts = [
        {"subject": "kvm", "level": "missing", "text": "none", "hint": ""},
        {"subject": "overhead", "level": "warning", "text": "less than VMs take", "hint": "set more"},
    ]
    (node.root / "check.json").write_text(json.dumps({"verdicts": verdicts}))
    await settled(node, access)

    assert node.notes[MESSAGE] == "pykata: less than VMs take (hint: set more)"
    assert node.labels[STATE] == "ready"
    (line,) = [each for each in (node.root / "log").read_text().splitlines() if each.startswith("check ")]
    assert "--config /etc/pyshim/configuration.toml --runtimeclass /var/lib/pyshim-install-" in line


async def test_a_node_that_is_drained_meanwhile_stays_drained(node: Node, access: Access) -> None:
    """Its taint comes between the agent's look and its patch, which holds the whole list."""

    def drain(patch: dict[str, Any]) -> None:
        if "spec" in patch and CORDON["key"] not in node.taints:
            node.server.nodes["n1"]["spec"]["taints"].append(CORDON)
            node.server.touch("n1")

    node.server.before_patch = drain
    await settled(node, access)

    assert node.taints == ["other", CORDON["key"]]


async def test_an_agent_that_is_ended_half_way_lets_the_installation_undo_its_work(node: Node, access: Access) -> None:
    began, undone = node.root / "began", node.root / "undone"
    node.on("install", f"trap 'touch {undone}; exit 130' TERM; touch {began}; while :; do sleep 0.05; done")
    async with node.running(access):
        await until(began.exists)
    assert undone.exists()

    assert (node.labels, node.taints) == ({STATE: "installing"}, ["other", TAINT])


async def removal_waits_for_a_pod(node: Node) -> None:
    await until(node.ready.exists)
    node.status(pods={"0.1.0-new": ["shop/web-0"]})
    node.wish.touch()
    await until(lambda: MESSAGE in node.notes)


async def test_removal_takes_the_labels_first_waits_for_pods_and_does_not_install_again(
    node: Node, access: Access
) -> None:
    async with node.running(access):
        await removal_waits_for_a_pod(node)
        assert (node.labels, node.ready.exists()) == ({STATE: "removing"}, False)
        assert node.notes[MESSAGE] == "waits for the end of pods shop/web-0"
        assert "uninstall" not in node.verbs()
        async with Api(access) as api:
            with pytest.raises(DeadlineExceeded, match=r"1 nodes .*n1 \(removing: waits .* shop/web-0"):
                await wait_removed(api, timeout_s=0.01, check_s=0.02)
        node.status()
        await until(lambda: not node.labels)
        node.wish.unlink()
        await asyncio.sleep(0.2)
        async with Api(access) as api:
            await wait_removed(api, timeout_s=1)

    assert (node.verbs().count("install"), node.verbs().count("uninstall")) == (1, 1)
    assert (node.labels, node.notes) == ({}, {})


async def test_a_removal_that_is_called_off_installs_again(node: Node, access: Access) -> None:
    async with node.running(access):
        await removal_waits_for_a_pod(node)
        node.wish.unlink()
        await until(node.ready.exists)

    assert node.labels["pyshim.io/pykata"] == "true"


async def test_the_api_server_may_be_away_for_a_while(node: Node, access: Access) -> None:
    node.server.faults += [503, 500, 401, 403, 429]
    await settled(node, access)

    assert node.labels[STATE] == "ready"


async def test_an_api_server_that_is_away_later_makes_no_node_install_again(node: Node, access: Access) -> None:
    async with node.running(access):
        await until(node.ready.exists)
        node.server.faults += [503] * 5
        await until(lambda: not node.server.faults)
        node.status(files={"/etc/pyshim/configuration.toml": "missing"})
        await until(lambda: MESSAGE in node.notes)

    assert node.verbs().count("install") == 1


@pytest.mark.parametrize(
    ("status", "error"), [(403, FailedPrecondition), (404, NotFound), (409, Unavailable), (503, Unavailable)]
)
async def test_an_answer_of_the_api_server_is_an_error_that_names_the_call(
    status: int, error: type[ShimError], node: Node, access: Access
) -> None:
    node.server.faults.append(status)
    async with Api(access) as api:
        with pytest.raises(error, match="GET /api/v1/nodes/n1: Fault: as told"):
            await api.node("n1")


def test_outside_of_a_pod_there_is_no_api_server() -> None:
    with pytest.raises(FailedPrecondition, match="KUBERNETES_SERVICE_HOST is not set"):
        in_cluster({})
    assert in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}).server == "https://[fd00::1]:443"


@pytest.mark.parametrize("missing", ["install", "release.json"])
def test_a_payload_that_lacks_a_part_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    node = Node(tmp_path, FakeApiServer())
    path = node.payload / missing
    path.rename(tmp_path / "elsewhere")

    with pytest.raises(NotFound, match=f"there is no '{missing}'"):
        require_payload(str(node.payload))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--handler", "runc", "--server", "https://x", "--token", "t", "--authority", "a"],
            "install handler 'runc': known are pykata",
        ),
        (["--handler", "pykata", "--server", "https://x"], "--server needs --token and --authority"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    node = Node(tmp_path, FakeApiServer())
    usual = ["--node", "n1", "--payload", str(node.payload), "--remove-when", "/x", "--ready-file", "/y"]

    assert run(["node-agent", "run", *usual, *words]) != 0
    assert said in capsys.readouterr().err


def test_sigterm_ends_the_program_well(tmp_path: Path) -> None:
    """The whole program waits for an API server that is not there."""
    node = Node(tmp_path, FakeApiServer())
    pair = self_signed(("127.0.0.1",), days=1, now=datetime.datetime.now(datetime.UTC))
    (tmp_path / "token").touch()
    (tmp_path / "ca.crt").write_bytes(pair.authority)
    usual = ["--node", "n1", "--payload", str(node.payload), "--remove-when", "/x", "--ready-file", str(node.ready)]
    api = [
        "--server",
        "https://127.0.0.1:1",
        "--token",
        str(tmp_path / "token"),
        "--authority",
        str(tmp_path / "ca.crt"),
    ]
    words = [sys.executable, "-m", "pyshim", "node-agent", "run", *usual, "--handler", "pykata", *api]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT) as agent:
        assert agent.stderr is not None
        assert "try failed" in agent.stderr.readline()
        agent.send_signal(signal.SIGTERM)
        agent.communicate(timeout=GENEROUS_S)

    assert agent.returncode == 0


@pytest.mark.parametrize(
    ("faults", "status", "said"),
    [([], 0, ""), ([403], 1, "GET /api/v1/nodes: Fault")],
    ids=["no node has pyshim", "the API server refuses"],
)
async def test_the_program_that_waits_for_removals_ends_with_the_answer_of_the_api_server(
    tmp_path: Path, faults: list[int], status: int, said: str
) -> None:
    server = FakeApiServer()
    server.add_node("n1")
    server.faults = faults
    async with server.serving(tmp_path) as access:
        words = ["--server", access.server, "--token", access.token, "--authority", access.authority]
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pyshim", "node-agent", "wait-removed", *words),
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        _, errors = await asyncio.wait_for(program.communicate(), GENEROUS_S)

    assert program.returncode == status, errors
    assert said in errors.decode()


@pytest.mark.parametrize(
    "words",
    [
        NodeReport(),
        NodeReport(state=State.INSTALLING),
        NodeReport(
            state=State.READY,
            handlers=frozenset({"pykata", "pykata-remote"}),
            release="0.1.0-a",
            message="m",
            older_pods=("a/b", "c/d"),
        ),
    ],
)
def test_a_node_says_what_was_written_and_a_second_patch_is_none(words: NodeReport) -> None:
    server = FakeApiServer()
    node = server.add_node("n1", labels={STATE: "no such state", "pyshim.io/pykata-tdx": "true"})
    patch = report_patch(node, words)
    assert patch is not None
    metadata = node["metadata"]
    for kind, found in patch["metadata"].items():
        metadata[kind] = {key: text for key, text in {**metadata.get(kind, {}), **found}.items() if text is not None}

    assert report_of(node) == words
    assert report_patch(node, words) is None
    assert metadata["labels"]["kubernetes.io/hostname"] == "n1"


def test_annotations_stay_within_what_an_object_may_have() -> None:
    node = FakeApiServer().add_node("n1")
    words = NodeReport(state=State.READY, message="x" * 10_000, older_pods=tuple(f"{'n' * 63}/{i}" for i in range(500)))

    patch = report_patch(node, words)

    assert patch is not None
    assert len(json.dumps(patch)) < 8192
    assert patch["metadata"]["annotations"][OLDER_PODS].endswith(",and 450 more")
