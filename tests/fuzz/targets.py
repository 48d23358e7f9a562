"""One function for each parser: it reads bytes from outside and returns, or raises what the parser promises.

Promised errors end here. Any other error is a finding.
"""

import asyncio
import base64
import json
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.message import DecodeError
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from hypervisors.qemu.qmp import Monitor
from hypervisors.remote.vm import _checked_agent_path
from protos import hypervisor_pb2
from protos.agent import agent_pb2
from protos.kubelet import dra_v1_pb2, podresources_v1_pb2
from pyshim.agent import translate as agent_translate
from pyshim.cdi import CdiError, as_json, inject, parse_annotations, parse_spec
from pyshim.cdi.files import document_of
from pyshim.cleanup.names import Places, belongs_to, is_foreign
from pyshim.config.annotations import with_annotations
from pyshim.config.effective import examine
from pyshim.config.load import build_config, typed
from pyshim.config.sources import read_files, read_source
from pyshim.host.fds import OwnedFd
from pyshim.host.python_child import Inbox
from pyshim.host.untrusted_text import MAX_LINE_BYTES, PacedText, TextTail
from pyshim.model import oci
from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import InvalidArgument, ShimError
from pyshim.model.host_facts import CgroupMode, Cpu, Machine, Node
from pyshim.model.ids import ContainerId, HostPath
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.observation import spans_from_json
from pyshim.model.oci import membership
from pyshim.model.remote_vms import shown
from pyshim.model.sizing import PlacementRequest, SizingRecord
from pyshim.model.task import RootfsMount, RuntimeOptions
from pyshim.monitor import socket as monitor_socket
from pyshim.monitor.answers import resize_request
from pyshim.monitor.exposition import GUEST_PREFIXES, filtered, filtered_text
from pyshim.node.cli import check_host
from pyshim.node.cli.debug_console import MarkedOutput
from pyshim.node.dra.claims import Claims, Prepared, _spec, allocated
from pyshim.node.dra.slices import product_of, slice_specs
from pyshim.node.install.drop_ins import Containerd, containerd_writes
from pyshim.node.install.handlers import HANDLERS
from pyshim.node.install.in_cluster.plan import report_of, report_patch
from pyshim.node.install.runtime import CONTAINERD, CRIO, ContainerRuntime
from pyshim.node.kubernetes.manifest import overhead_of, pod_sizing, pods_in, read_documents
from pyshim.node.kubernetes.pod_size import quantity
from pyshim.node.monitor.merge import Merge, SandboxMetrics
from pyshim.node.monitor.scrape import PREFIXES
from pyshim.node.nri import translate as nri_translate
from pyshim.node.nri.assignments import Assignments
from pyshim.node.nri.description import read_description
from pyshim.node.nri.mux import MuxError, MuxFrameReader
from pyshim.node.nri.pods import Pods
from pyshim.node.webhook.review import Action, answer
from pyshim.pod.plan.guest_spec import guest_spec
from pyshim.pod.plan.hooks import guest_hooks, hook_state
from pyshim.pod.plan.pod_spec import RESOLV_CONF, pod_spec
from pyshim.pod.plan.verity import read_verity, root_device
from pyshim.resources.confidential.plan import initdata
from pyshim.resources.devices.host import kubelet
from pyshim.resources.devices.plan.instances import read_instances
from pyshim.resources.machine import machine_of
from pyshim.resources.network.plan.direct import direct_network
from pyshim.resources.volumes.host.sources import parse_mount_info
from pyshim.resources.volumes.plan.guest_pull import root_pulled_in_guest
from pyshim.resources.volumes.plan.layers import check_layer, is_layer, layer_verity, verity_options
from pyshim.resources.volumes.plan.root_disks import root_disks
from pyshim.resources.volumes.plan.virtual_volume import image_on_disk, virtual_volume
from pyshim.start import dialect, invocation, wire, zygote_client
from pyshim.start.invocation import CommandError
from pyshim.state import schema
from pyshim.task import translate, translate_sandbox, translate_stats
from pyshim.tracing.child import problem_in
from pyshim.ttrpc.connection import ClientConnection, ServerConnection
from pyshim.ttrpc.messages import MalformedMessage, decode_request, decode_response
from tests.fakes.clock import run_fast_forward
from tests.fakes.qmp_peer import QmpPeer
from tests.unit.node.webhook.reviews import pod_class

CORPUS = Path(__file__).with_name("corpus")
_HYPERVISOR = "io.katacontainers.config.hypervisor."
_PIPE_BYTES = 65536
"""A pipe takes so many without a reader."""
_QUERIES = ("query-status", "query-cpus-fast", "query-hotpluggable-cpus", "query-memory-size-summary")
_PATH_KINDS = (ResourceKind.CGROUP, ResourceKind.DIRECTORY, ResourceKind.FILE, ResourceKind.MOUNT, ResourceKind.SOCKET)
_BELONGS = belongs_to("sb1", Places(), "/run/vc/sbs", container_ids=("app",))
_PREPARED = (Prepared(requests=("gpu",), pool="p", device="gpu-1", cdi="pyshim.dev/gpu=gpu-1"),)
_POD_CLASS = pod_class()
_LOOP = asyncio.new_event_loop()
_CONFIG = build_config(read_source(RuntimeOptions(config_path="", config_body=b"[hypervisor.qemu]\n"), {}))
_SPEC = oci.parse_spec((CORPUS / "oci-spec" / "least.json").read_bytes(), "config.json")


def corpus(name: str) -> list[Path]:
    """The inputs of a target."""
    return sorted((CORPUS / name).iterdir())


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _with_file(data: bytes, read: Callable[[str], object]) -> None:
    """`read` is called with the path of a file that holds `data`."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        file.write(data)
        file.flush()
        read(file.name)


def _drop_ins(data: bytes) -> None:
    """A configuration and, after each NUL, the text of a drop-in: the last that says a key wins, and names its line."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
        files = []
        for number, content in enumerate(data.split(b"\0")[:9]):
            files.append(f"{root}/{number}.toml")
            Path(files[-1]).write_bytes(content)
        with suppress(ShimError):
            source = read_files(tuple(files))
            assert {line.file for line in source.lines.values()} <= set(files)
            build_config(source)


def _configuration(data: bytes) -> None:
    with suppress(ShimError):
        build_config(read_source(RuntimeOptions(config_path="", config_body=data), {}))


def _config_annotations(data: bytes) -> None:
    """Lines of NAME=VALUE; a name without a slash is one of the hypervisor's keys."""
    named = [line.partition("=") for line in _text(data).split("\n")]
    annotations = {name if "/" in name or "." in name else _HYPERVISOR + name: value for name, _, value in named}
    body = b'[hypervisor.qemu]\nenable_annotations = [".*"]\n'
    with suppress(ShimError):
        source = read_source(RuntimeOptions(config_path="", config_body=body), {})
        typed(with_annotations(examine(source), annotations))


def _oci_spec(data: bytes) -> None:
    with suppress(ShimError):
        spec = oci.parse_spec(data, "config.json")
        membership(spec.annotations, ContainerId("c"))
        raw = guest_spec(
            spec,
            root_path="/r",
            mounts=(),
            seccomp=True,
            hostname="h",
            sysctls={},
            terminal=False,
            stdin=False,
            devices=(),
        )
        agent_translate.spec(raw, "container 'c'")


def _hooks(data: bytes) -> None:
    """The member `hooks` of a spec: a hook that is taken has an environment, and a state that it can read."""
    text = (CORPUS / "oci-spec" / "least.json").read_bytes().rstrip()
    with suppress(ShimError):
        spec = oci.parse_spec(text[:-1] + b', "hooks": ' + data + b"}", "config.json")
        json.dumps(guest_hooks(spec.raw.get("hooks")))
        for hook in (*(spec.hooks.prestart or ()), *(spec.hooks.poststop or ())):
            assert all("=" in variable for variable in hook.env or ())
        state = hook_state(spec, container_id="c", bundle="/b", status="created", pid=1)
        assert json.loads(state)["pid"] == 1


def _state(data: bytes) -> None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    with suppress(ShimError):
        schema.document_of(schema.state_from_json(document, "persist.json", sealed=True))


def _ledger(data: bytes) -> None:
    """Entries as JSON, one a line: those the check lets pass bear the sandbox's id, or lie in a bundle of its."""
    for line in data.split(b"\n"):
        try:
            entry = msgspec.json.decode(line, type=LedgerEntry)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if entry.kind not in _PATH_KINDS or is_foreign(entry, _BELONGS):
            continue
        parts = {*entry.key.split("/"), entry.detail.get("sandbox")}
        names = {"sb1", "kata_sb1", *(("app",) if entry.kind is ResourceKind.MOUNT else ())}
        is_scope = entry.kind is ResourceKind.CGROUP and "-sb1.scope" in entry.key
        assert is_scope or not names.isdisjoint(parts), entry
        assert ".." not in parts, entry


def _qmp(data: bytes) -> None:
    """First line: the greeting, the usual one when empty. The rest is every answer; $ID in it is the request's id."""
    greeting, _, answers = data.partition(b"\n")

    def answer(peer: QmpPeer, request: dict[str, Any]) -> None:
        peer.send(answers.replace(b"$ID", json.dumps(request.get("id")).encode()))

    async def talk() -> None:
        peer = QmpPeer(dict.fromkeys(_QUERIES, answer), greeting=greeting + b"\n" if greeting else None)
        monitor = Monitor(name="fuzz", on_event=lambda event: None)
        try:
            with suppress(ShimError):
                await monitor.connect(peer.client, timeout_s=1)
                for ask in (monitor.status, monitor.cpus, monitor.cpu_slots, monitor.memory_size):
                    with suppress(ShimError):
                        await ask()
        finally:
            await monitor.close()
            await peer.close()

    run_fast_forward(talk())


def _ttrpc_server(data: bytes) -> None:
    core = ServerConnection()
    core.receive_data(data)
    core.receive_eof()


def _ttrpc_client(data: bytes) -> None:
    core = ClientConnection()
    for _ in range(3):
        core.request("s", "m", b"")
    core.receive_data(data)
    core.receive_eof()


def _ttrpc_messages(data: bytes) -> None:
    for decode in (decode_request, decode_response):
        with suppress(MalformedMessage):
            decode(data)


def _nri_frames(data: bytes) -> None:
    reader = MuxFrameReader()
    with suppress(MuxError):
        parts = reader.feed(data)
        assert sum(len(part) for _, part in parts) <= len(data)
        reader.end()


def _pods() -> Pods:
    """Those of a node with two CPUs, one of them reserved."""
    one = Cpu(id=0, core=0, l3=0, die=0, socket=0, node=0, online=True)
    nodes = (Node(id=0, memory_bytes=1 << 30, distances=(10,)),)
    machine = Machine(cpus=(one, replace(one, id=1, core=1)), nodes=nodes)
    return Pods(Assignments(machine=machine, reserved=(0,)), frozenset({"", "pykata"}))


def _nri_events(data: bytes) -> None:
    """What a runtime says, as every message it may be; the plugin follows each as far as it can be read."""
    pods = _pods()
    unreadable = (DecodeError, ShimError)
    with suppress(*unreadable):
        nri_translate.runtime(data)
    with suppress(*unreadable):
        pods.pod_started(nri_translate.pod_of(data))
    with suppress(*unreadable):
        nri_translate.adjusted(pods.create_container(*nri_translate.container_of(data)), mark=True)
    with suppress(*unreadable):
        container_id, asked = nri_translate.wanted_update(data)
        nri_translate.updated(container_id, pods.update_container(container_id, asked))
    with suppress(*unreadable):
        found, containers, _ = nri_translate.inventory(data)
        pods.synchronize(found, containers)
    with suppress(*unreadable):
        nri_translate.state_change(data)
    with suppress(*unreadable):
        nri_translate.failed(data)
    nri_translate.updates(pods.due())


def _cdi(data: bytes) -> None:
    with suppress(CdiError):
        spec = parse_spec(document_of(data, "x.yaml"), "x.yaml")
        assert parse_spec(as_json(spec), "again") == spec
        for device in spec.devices:
            with suppress(CdiError):
                inject({"linux": {"namespaces": [{"type": "user"}]}}, device.container_edits)


def _dra_claim(data: bytes) -> None:
    """A ResourceClaim as the API server has it: devices that are taken make specs that CDI accepts."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    with suppress(ShimError):
        for device in allocated(document, "u1"):
            spec = _spec(product_of(device.device), "c", [device.device])
            parse_spec(spec, "x.json")
            assert device.cdi == f"{spec['kind']}={device.device}"


def _dra_requests(data: bytes) -> None:
    """What the kubelet says: a claim's uid is a file's name."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
        claims = Claims(specs=Path(root, "specs"), records=Path(root, "records"))
        with suppress(DecodeError):
            for claim in dra_v1_pb2.NodeUnprepareResourcesRequest.FromString(data).claims:
                with suppress(ShimError):
                    claims.recorded(claim.uid)
                    claims.prepare(claim.uid, claim.name, _PREPARED)
                    assert claims.recorded(claim.uid) == _PREPARED
                    claims.unprepare(claim.uid)
        assert not [path for path in Path(root).rglob("*") if path.is_file()]


def _placement_request(data: bytes) -> None:
    """A shim's need, twice: what it gets is of this node."""
    with suppress(ShimError):
        need = from_json(data, PlacementRequest, damaged("need"))
        for _ in range(2):
            assert set(_pods().place_for_shim(need).vcpu_cpus) <= {0, 1}


def _cdi_annotations(data: bytes) -> None:
    name, _, value = _text(data).partition("\n")
    with suppress(CdiError):
        parse_annotations({f"cdi.k8s.io/{name}": value})


def _initdata(data: bytes) -> None:
    with suppress(ShimError):
        initdata.encode(initdata.parse(data, "annotation"))
    with suppress(ShimError):
        initdata.decode(_text(data), "annotation")


def _pod_resources(data: bytes) -> None:
    with suppress(DecodeError, ShimError):
        kubelet._read(podresources_v1_pb2.PodResources.FromString(data))


def _manifest(data: bytes) -> None:
    def read(path: str) -> None:
        documents = read_documents(path)
        for pod in pods_in(documents, path):
            pod_sizing(pod, path, overhead_of(documents, pod.runtime_class, path))

    with suppress(ShimError):
        _with_file(data, read)


def _admission_review(data: bytes) -> None:
    for action in Action:
        with suppress(InvalidArgument):
            json.dumps(answer(data, {"pykata": _POD_CLASS}, action).document)


def _quantity(data: bytes) -> None:
    with suppress(ShimError):
        quantity(_text(data), "x")


def _sizing_record(data: bytes) -> None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    with suppress(ShimError):
        record = SizingRecord.from_json(document, "record")
        assert SizingRecord.from_json(record.as_json(), "again") == record


def _monitor_request(data: bytes) -> None:
    with suppress(ShimError):
        resize_request(data)


class _Continued:
    """A client's writer that takes the "100 Continue"."""

    def write(self, data: bytes) -> None:
        assert data.startswith(b"HTTP/1.1 100 ")


async def _read_head(data: bytes) -> None:
    reader = asyncio.StreamReader(limit=64 * 1024)
    reader.feed_data(data)
    reader.feed_eof()
    with suppress(ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, monitor_socket._BodyTooLarge):
        await monitor_socket._read(reader, _Continued())  # type: ignore[arg-type]


def _monitor_head(data: bytes) -> None:
    _LOOP.run_until_complete(_read_head(data))


def _direct_network(data: bytes) -> None:
    with suppress(ShimError):
        direct_network(data, "/file", sandbox_id="s", queues=1)


def _instance_types(data: bytes) -> None:
    """A table that is taken can be offered."""
    with suppress(InvalidArgument):
        specs = slice_specs(read_instances(data, "/file"))
        assert all(len(each.get("devices", ())) <= 64 for each in specs)


def _image_volume(data: bytes) -> None:
    """The volume that a snapshotter hands over instead of a root, before base64."""
    option = f"io.katacontainers.volume={base64.b64encode(data).decode()}"
    root = RootfsMount(type="overlay", source="overlay", target="", options=(option,))
    with suppress(ShimError):
        volume = virtual_volume((root,), ContainerId("c"))
        if volume and image_on_disk(volume, ContainerId("c")) is None:
            root_pulled_in_guest(volume, _SPEC, _CONFIG, ContainerId("c"))


def _image_layers(data: bytes) -> None:
    """The mounts of a root of EROFS files, in JSON: the overlay that is made of them names places of the guest only."""
    try:
        rootfs = msgspec.json.decode(data, type=tuple[RootfsMount, ...])
    except (ValueError, msgspec.DecodeError, RecursionError):
        return
    with suppress(ShimError):
        root = root_disks(rootfs, _CONFIG, ContainerId("c"))
        for storage in root.storages if root else ():
            (lower,) = (option for option in storage.options if option.startswith("lowerdir=/run/layers/"))
            assert lower.count(":") + 1 == sum(is_layer(mount) for mount in rootfs)
            assert "{{" not in "".join(storage.options)


def _layer(data: bytes) -> None:
    """A layer's superblock, that of its hashes, and the file with its root hash, behind each other."""
    superblock, hashes, document = data[:128], data[128:640], data[640:]
    with suppress(ShimError):
        check_layer("/l", superblock, len(data))
    with suppress(ShimError):
        options = verity_options("/l", layer_verity("/v", document), hashes)
        assert all("\0" not in option for option in options)


def _namespace_messages(data: bytes) -> None:
    """What the child in a pod's network namespace says."""
    ours, child = socket.socketpair()
    inbox = Inbox()
    with ours, child, suppress(ValueError):
        ours.setblocking(False)
        child.sendall(data[:65536] or b"\0")
        inbox.receive(ours)
        while inbox.next():
            pass


def _remote_replies(data: bytes) -> None:
    with suppress(DecodeError, ShimError):
        _checked_agent_path("vm", hypervisor_pb2.CreateVMResponse.FromString(data).agentSocketPath)
    with suppress(DecodeError):
        assert shown(hypervisor_pb2.VersionResponse.FromString(data).version).isprintable()


def _guest_metrics(data: bytes) -> None:
    text, _ = filtered_text(data.decode(errors="replace"), GUEST_PREFIXES)
    assert filtered_text(text, GUEST_PREFIXES) == (text, "")


def _direct_volume(data: bytes) -> None:
    with suppress(ShimError):
        parse_mount_info(data, "/volume", "/record")


def _trace_receiver(data: bytes) -> None:
    problem = problem_in(data)
    assert problem.isprintable()
    assert len(problem) < 300


def _trace(data: bytes) -> None:
    with suppress(ValueError, RecursionError):
        spans_from_json(json.loads(data))


def _start_stdin(data: bytes) -> None:
    call = invocation.parse(["-namespace", "n", "-id", "i", "start"])
    dialect.params_of(data, call)
    with suppress(wire.WireError):
        wire.decode(data)


def _start_words(data: bytes) -> None:
    with suppress(CommandError):
        invocation.parse(_text(data).split("\n"))


def _start_spec(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as bundle:
        Path(bundle, "config.json").write_bytes(data)
        with suppress(CommandError):
            invocation.group_id(bundle, "c1")


def _zygote_request(data: bytes) -> None:
    with suppress(ValueError):
        zygote_client.decode(data)


def _task_requests(data: bytes) -> None:
    for read in (
        translate.create_request,
        translate.exec_request,
        translate.update_request,
        translate.kill_request,
        translate.resize_request,
        translate.shutdown_request,
        translate.process_ref,
    ):
        with suppress(ShimError):
            read(data)


def _sandbox_requests(data: bytes) -> None:
    """What is taken of CreateSandbox makes a spec, as containerd's own pod would have one."""
    for read in (
        translate_sandbox.sandbox_ref,
        translate_sandbox.status_request,
        translate_sandbox.update_request,
    ):
        with suppress(ShimError):
            read(data)
    with suppress(ShimError):
        request = translate_sandbox.create_request(data)
        if request.pod is not None:
            pod_spec(request, request.pod, {RESOLV_CONF: HostPath("/b/resolv.conf")})


def _agent_replies(data: bytes) -> None:
    with suppress(DecodeError):
        agent_translate.agent_details(agent_pb2.GuestDetailsResponse.FromString(data))
    with suppress(DecodeError):
        agent_translate.volume_stats(agent_pb2.VolumeStatsResponse.FromString(data))
    with suppress(DecodeError, ShimError):
        stats = agent_translate.container_stats(agent_pb2.StatsContainerResponse.FromString(data))
        for mode in CgroupMode:
            translate_stats.metrics(stats, mode)
    with suppress(DecodeError, ShimError):
        agent_translate.stream_data(data)


def _machine_description(data: bytes) -> None:
    with suppress(ShimError):
        _with_file(data, read_description)


_SYSFS = (
    *("cpu/online", "cpu/present", "node/online", "node/node0/cpulist", "node/node0/meminfo", "node/node0/distance"),
    *("cpu/cpu0/topology/core_cpus_list", "cpu/cpu0/topology/package_cpus_list", "cpu/cpu0/topology/die_cpus_list"),
    *("cpu/cpu0/topology/cluster_cpus_list", "cpu/cpu0/cache/index3/level", "cpu/cpu0/cache/index3/shared_cpu_list"),
)


def _sysfs(data: bytes) -> None:
    """Each file's text, in this order."""
    with suppress(ShimError):
        machine_of(dict(zip(_SYSFS, _text(data).split("|"), strict=False)))


def _verity(data: bytes) -> None:
    with suppress(ShimError):
        root_device(read_verity(_text(data), "read verity"), data="/dev/vda1", hashes="/dev/vda2")


def _node_scrape(data: bytes) -> None:
    """A hostile shim's answer beside an honest guest's: the text is well-formed, and the honest sample is there."""
    honest = filtered('kata_guest_load{item="load1"} 0.5\n', GUEST_PREFIXES).families
    hostile = filtered(data.decode(errors="replace"), PREFIXES, composed=True).families
    guest = {name: family for name, family in hostile.items() if name.startswith(GUEST_PREFIXES)}
    text = Merge().text(
        [SandboxMetrics("a", {"sandbox_id": "a"}, guest), SandboxMetrics("b", {"sandbox_id": "b"}, honest)]
    )
    families = {each.name: each.samples for each in text_string_to_metric_families(text)}
    assert {"item": "load1", "sandbox_id": "b"} in [sample.labels for sample in families["kata_guest_load"]]
    assert all(sample.labels["sandbox_id"] in "ab" for samples in families.values() for sample in samples)


class _Metadata(msgspec.Struct):
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Node(msgspec.Struct):
    """A Node in the types that an API server guarantees."""

    metadata: _Metadata | None = None


def _node_object(data: bytes) -> None:
    """Other clients write any text into labels and annotations; the words read from it are written back as they are."""
    try:
        node = msgspec.to_builtins(msgspec.json.decode(data, type=_Node))
    except (ValueError, msgspec.DecodeError, RecursionError):
        return
    words = report_of(node)
    patch = report_patch(node, words) or {"metadata": {}}
    metadata = node["metadata"] or {}
    for kind, changes in patch["metadata"].items():
        both = {**(metadata.get(kind) or {}), **changes}
        metadata[kind] = {name: text for name, text in both.items() if text is not None}
    assert report_patch({"metadata": metadata}, words) is None


def _debug_marks(data: bytes) -> None:
    """A guest's console may print anything at any pace; the pieces make no difference."""
    outputs = []
    for size in (1 + len(data) // 100, 1 + len(data) // 7, 1 + len(data)):
        marked = MarkedOutput(b"b1", b"e1:")
        out = b"".join(marked.feed(data[at : at + size]) for at in range(0, len(data), size))
        outputs.append((out, marked.exit_code) if marked.exit_code is not None else (b"", None))
    assert len(set(outputs)) == 1, outputs


def _configuration_of(runtime: ContainerRuntime, data: bytes, files: tuple[str, str]) -> None:
    """The runtime's file, and after a NUL one that it reads besides."""
    if b".." in data:
        return  # an import of any file of this machine
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
        for path, content in zip(files, data.split(b"\0", 1), strict=False):
            Path(f"{root}{path}").parent.mkdir(parents=True)
            Path(f"{root}{path}").write_bytes(content)
        facts = check_host._runtime(runtime, root, lambda _: f"{runtime.program} version 2.1.0")
    assert all(isinstance(name, str) for name in facts.runtimes)
    assert len(facts.error) < 1000


def _containerd_configuration(data: bytes) -> None:
    _configuration_of(CONTAINERD, data, ("/etc/containerd/config.toml", "/etc/containerd/conf.d/more.toml"))
    text = data.partition(b"\0")[0].decode(errors="replace")
    node = Containerd(version=(2, 1), config_path="/etc/containerd/config.toml", config_text=text)
    with suppress(ShimError):
        containerd_writes(node, HANDLERS, shim="/shim")


def _crio_configuration(data: bytes) -> None:
    _configuration_of(CRIO, data, ("/etc/crio/crio.conf", "/etc/crio/crio.conf.d/10-more.conf"))


def _console_text(data: bytes) -> None:
    """A guest's console: lines are bounded and printable, and neither pieces nor the pace make a difference."""
    data, outputs = data[:_PIPE_BYTES], []
    for size in (1 + len(data) // 100, 1 + len(data)):
        lines: list[str] = []
        tail = TextTail(max_lines=5, on_line=lines.append)
        for at in range(0, len(data), size):
            tail.feed(data[at : at + size])
        tail.finish()
        assert tail.lines() == tuple(lines[-5:])
        outputs.append(lines)
    outputs.append(run_fast_forward(_paced(data)))
    assert outputs[0] == outputs[1] == outputs[2]
    assert all(line.isprintable() and len(line) <= MAX_LINE_BYTES for line in lines), lines


async def _paced(data: bytes) -> list[str]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.write(write_fd, data)
    os.close(write_fd)
    lines: list[str] = []
    fd = OwnedFd(read_fd)
    PacedText(fd, max_lines=5, on_line=lines.append)
    while fd.is_open:  # noqa: ASYNC110
        await asyncio.sleep(1)
    return lines


TARGETS: dict[str, Callable[[bytes], None]] = {
    "agent-replies": _agent_replies,
    "cdi": _cdi,
    "cdi-annotations": _cdi_annotations,
    "admission-review": _admission_review,
    "config-annotations": _config_annotations,
    "configuration": _configuration,
    "console-text": _console_text,
    "containerd-configuration": _containerd_configuration,
    "crio-configuration": _crio_configuration,
    "debug-marks": _debug_marks,
    "direct-network": _direct_network,
    "dra-claim": _dra_claim,
    "dra-requests": _dra_requests,
    "drop-ins": _drop_ins,
    "direct-volume": _direct_volume,
    "hooks": _hooks,
    "image-layers": _image_layers,
    "image-volume": _image_volume,
    "instance-types": _instance_types,
    "initdata": _initdata,
    "layer": _layer,
    "ledger": _ledger,
    "machine-description": _machine_description,
    "manifest": _manifest,
    "guest-metrics": _guest_metrics,
    "monitor-head": _monitor_head,
    "monitor-request": _monitor_request,
    "namespace-messages": _namespace_messages,
    "node-object": _node_object,
    "node-scrape": _node_scrape,
    "nri-events": _nri_events,
    "nri-frames": _nri_frames,
    "oci-spec": _oci_spec,
    "placement-request": _placement_request,
    "pod-resources": _pod_resources,
    "qmp": _qmp,
    "quantity": _quantity,
    "remote-replies": _remote_replies,
    "sandbox-requests": _sandbox_requests,
    "sizing-record": _sizing_record,
    "start-spec": _start_spec,
    "start-stdin": _start_stdin,
    "start-words": _start_words,
    "state": _state,
    "sysfs": _sysfs,
    "task-requests": _task_requests,
    "trace": _trace,
    "trace-receiver": _trace_receiver,
    "ttrpc-client": _ttrpc_client,
    "ttrpc-messages": _ttrpc_messages,
    "ttrpc-server": _ttrpc_server,
    "verity": _verity,
    "zygote-request": _zygote_request,
}
