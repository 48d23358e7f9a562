"""The OCI runtime spec: which container runtime wrote it, which container of which pod it is of, and the parts read.

A spec holds the runtime's annotations and the pod's own in one table, so only the keys of that one runtime are read.
containerd's annotations replace a pod's of the same key. CRI-O lets a pod's annotations replace its own in the spec of
the sandbox, but not the kubelet's labels, from which the pod's names are read. Sources: CRI-O 1.36,
server/sandbox_run_linux.go; OCI runtime-spec 1.1, config.md and config-linux.md.
"""

import posixpath
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from pyshim.model.decoding import Text, decoded, described, json_value
from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId, SandboxId, checked_id


class Caller(StrEnum):
    CRI_O = "CRI-O"
    CONTAINERD = "containerd"
    CRI_DOCKERD = "cri-dockerd"


class AnnotationKeys(NamedTuple):
    """One runtime's key for each of these; empty where it has none."""

    container_type: str
    sandbox_id: str
    pod_name: str
    pod_namespace: str
    pod_uid: str
    container_name: str
    image_name: str = ""
    host_network: str = ""
    """Its value is "true" for a pod on the host's network. CRI-O needs it: its specs name that namespace by a path."""
    sandbox_container_name: str = ""
    """Not a key: the value of `container_name` in a sandbox's own spec, where the pod cannot change it."""


_KUBELET_LABELS = {
    "pod_name": "io.kubernetes.pod.name",
    "pod_namespace": "io.kubernetes.pod.namespace",
    "pod_uid": "io.kubernetes.pod.uid",
    "container_name": "io.kubernetes.container.name",
    "sandbox_container_name": "POD",
}
ANNOTATION_KEYS: Mapping[Caller, AnnotationKeys] = {
    Caller.CRI_O: AnnotationKeys(
        container_type="io.kubernetes.cri-o.ContainerType",
        sandbox_id="io.kubernetes.cri-o.SandboxID",
        image_name="io.kubernetes.cri-o.ImageName",
        host_network="io.kubernetes.cri-o.HostNetwork",
        **_KUBELET_LABELS,
    ),
    Caller.CONTAINERD: AnnotationKeys(
        container_type="io.kubernetes.cri.container-type",
        sandbox_id="io.kubernetes.cri.sandbox-id",
        pod_name="io.kubernetes.cri.sandbox-name",
        pod_namespace="io.kubernetes.cri.sandbox-namespace",
        pod_uid="io.kubernetes.cri.sandbox-uid",
        container_name="io.kubernetes.cri.container-name",
        image_name="io.kubernetes.cri.image-name",
    ),
    Caller.CRI_DOCKERD: AnnotationKeys(
        container_type="io.kubernetes.docker.type", sandbox_id="io.kubernetes.sandbox.id", **_KUBELET_LABELS
    ),
}


def caller_of(annotations: Mapping[str, str]) -> Caller:
    """The runtime whose `container_type` key is present; containerd if none is (ctr, nerdctl).

    Raises InvalidArgument if the keys of two runtimes are present: the pod has set one of them.
    """
    found = [caller for caller, keys in ANNOTATION_KEYS.items() if keys.container_type in annotations]
    if len(found) > 1:
        names = " and ".join(f"'{ANNOTATION_KEYS[caller].container_type}'" for caller in found)
        raise InvalidArgument(f"read annotations {names}: they are of two container runtimes")
    return found[0] if found else Caller.CONTAINERD


def keys_of(annotations: Mapping[str, str]) -> AnnotationKeys:
    """The keys of the runtime that wrote `annotations`. Raises as `caller_of`."""
    return ANNOTATION_KEYS[caller_of(annotations)]


class PodName(msgspec.Struct, frozen=True):
    """A pod's identity in Kubernetes; all fields are empty for a sandbox that is not a pod."""

    name: str = ""
    namespace: str = ""
    uid: str = ""


def pod_of(annotations: Mapping[str, str]) -> PodName:
    """The pod that the annotations of a spec name. Raises as `caller_of`."""
    keys = keys_of(annotations)
    return PodName(
        name=annotations.get(keys.pod_name, ""),
        namespace=annotations.get(keys.pod_namespace, ""),
        uid=annotations.get(keys.pod_uid, ""),
    )


def container_name(annotations: Mapping[str, str]) -> str:
    """The container's name in its pod; empty for a container without a pod. Raises as `caller_of`."""
    return annotations.get(keys_of(annotations).container_name, "")


_SANDBOX_VALUES = frozenset({"sandbox", "podsandbox"})


class ContainerKind(StrEnum):
    POD_SANDBOX = "pod_sandbox"
    POD_CONTAINER = "pod_container"
    SINGLE_CONTAINER = "single_container"


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    kind: ContainerKind
    sandbox_id: SandboxId
    """The container's own id unless it is a POD_CONTAINER."""


def membership(annotations: Mapping[str, str], container_id: ContainerId) -> Membership:
    """The container's kind and the sandbox that it belongs to.

    Raises InvalidArgument for an unknown container type, for the keys of two runtimes, for a pod container without a
    sandbox id, and for a sandbox that poses as a pod container: under CRI-O a pod's annotations may replace the type.
    """
    keys = keys_of(annotations)
    value = annotations.get(keys.container_type)
    if value is None:
        return Membership(kind=ContainerKind.SINGLE_CONTAINER, sandbox_id=SandboxId(container_id))
    if value in _SANDBOX_VALUES:
        return Membership(kind=ContainerKind.POD_SANDBOX, sandbox_id=SandboxId(container_id))
    if value != "container":
        raise InvalidArgument(f"read annotation '{keys.container_type}': unknown container type {value[:100]!r}")
    sandbox_id = annotations.get(keys.sandbox_id, "")
    if not sandbox_id:
        raise InvalidArgument(f"read annotation '{keys.sandbox_id}': container '{container_id}' names no sandbox")
    if keys.sandbox_container_name and annotations.get(keys.container_name) == keys.sandbox_container_name:
        raise InvalidArgument(
            f"read annotation '{keys.sandbox_id}': '{container_id}' is a sandbox itself and cannot join another"
        )
    return Membership(
        kind=ContainerKind.POD_CONTAINER,
        sandbox_id=SandboxId(checked_id(sandbox_id, f"annotation '{keys.sandbox_id}'")),
    )


MAX_SPEC_BYTES = 16 * 1024 * 1024
MAX_MOUNTS = 4096
"""The most mounts of one container. Each takes up to four of a mount namespace's 100,000 (fs.mount-max)."""


class OciMount(msgspec.Struct, frozen=True, kw_only=True):
    destination: str
    type: str
    source: str
    options: tuple[str, ...]

    @property
    def is_bind(self) -> bool:
        return self.type == "bind" or "bind" in self.options or "rbind" in self.options

    @property
    def is_read_only(self) -> bool:
        return "ro" in self.options or self.is_read_only_recursive

    @property
    def is_read_only_recursive(self) -> bool:
        """The mounts below the source become read-only, too."""
        return "rro" in self.options


class OciNamespace(msgspec.Struct, frozen=True, kw_only=True):
    type: Text
    path: Text = ""


class OciDevice(msgspec.Struct, frozen=True, kw_only=True):
    path: Text
    type: Text
    major: int = 0
    minor: int = 0


class OciHook(msgspec.Struct, frozen=True, kw_only=True):
    path: Text
    args: tuple[Text, ...] | None = None
    """The whole argv; argv[0] may differ from `path`."""
    env: tuple[Text, ...] | None = None
    """The whole environment."""
    timeout: int | None = None
    """In seconds."""


class OciHooks(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Programs to run at points of a container's life, each list in order. None (null in JSON) is an empty list."""

    prestart: tuple[OciHook, ...] | None = None
    create_runtime: tuple[OciHook, ...] | None = None
    create_container: tuple[OciHook, ...] | None = None
    start_container: tuple[OciHook, ...] | None = None
    poststart: tuple[OciHook, ...] | None = None
    poststop: tuple[OciHook, ...] | None = None


NO_HOOKS = OciHooks()


class OciSpec(msgspec.Struct, frozen=True, kw_only=True):
    root_path: str
    hostname: str
    terminal: bool
    mounts: tuple[OciMount, ...]
    namespaces: tuple[OciNamespace, ...]
    devices: tuple[OciDevice, ...]
    cgroups_path: str
    annotations: Mapping[str, str]
    hooks: OciHooks
    raw: Mapping[str, Any]
    selinux_label: str = ""
    """The label of the container's process. containerd gives all containers of a pod the same pair of categories."""

    @property
    def group_ids(self) -> tuple[int, ...]:
        """The groups of the container's first process besides its own, the pod's fsGroup among them.

        containerd lists the process's own group, too.
        """
        user = (self.raw.get("process") or {}).get("user") or {}
        return tuple(each for each in user.get("additionalGids") or () if each != user.get("gid", 0))

    def is_in_hosts(self, kind: str) -> bool:
        """The container is in the host's namespace of this kind. False if the spec lists no namespaces at all."""
        return bool(self.namespaces) and self.namespace_path(kind) is None

    def namespace_path(self, kind: str) -> str | None:
        """The path of the namespace of `kind` to join; empty for a new one; None for the host's."""
        for namespace in self.namespaces:
            if namespace.type == kind:
                return namespace.path
        return None


class _Process(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    args: tuple[str, ...]
    cwd: Text = "/"
    terminal: bool = False
    selinux_label: Text = ""


class _Root(msgspec.Struct, frozen=True, kw_only=True):
    path: Text


class _Mount(msgspec.Struct, frozen=True, kw_only=True):
    destination: Text
    type: Text = ""
    source: Text = ""
    options: tuple[str, ...] | None = None


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    access: Text = ""


class _Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The members of `linux.resources` that are read from `OciSpec.raw`: here only their types are checked."""

    cpu: Mapping[str, Any] | None = None
    memory: Mapping[str, Any] | None = None
    devices: tuple[_Rule, ...] | None = None


class _Linux(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    namespaces: tuple[OciNamespace, ...] | None = None
    devices: tuple[OciDevice, ...] | None = None
    cgroups_path: Text = ""
    resources: _Resources | None = None
    sysctl: Mapping[str, str] | None = None


@described
class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """The spec's members that are read. Go writes an empty list or object as null."""

    process: _Process
    root: _Root
    hostname: Text = ""
    mounts: tuple[_Mount, ...] | None = None
    linux: _Linux | None = None
    annotations: Mapping[str, str] | None = None
    hooks: OciHooks | None = None


_NAMESPACES = frozenset({"pid", "network", "ipc", "uts", "mount", "user", "cgroup", "time"})


def parse_spec(data: bytes, where: str) -> OciSpec:
    """The spec in the JSON text `data`. Raises InvalidArgument naming `where` and the first wrong member."""

    def refused(problem: str) -> InvalidArgument:
        return InvalidArgument(f"read spec '{where}': {problem}")

    raw = json_value(data, lambda problem: InvalidArgument(f"parse spec '{where}': {problem}"))
    document = decoded(raw, _Document, refused)
    process, root, linux = document.process, document.root, document.linux or _Linux()
    mounts, namespaces = document.mounts or (), linux.namespaces or ()
    if len(mounts) > MAX_MOUNTS:
        raise refused(f"mounts has {len(mounts)} entries, at most {MAX_MOUNTS} are supported")
    if not process.args:
        raise refused("process.args is empty")
    if not root.path:
        raise refused("root.path is empty")
    directories = {"process.cwd": process.cwd}
    directories |= {f"mounts[{index}].destination": mount.destination for index, mount in enumerate(mounts)}
    for member, path in directories.items():
        if not path.startswith("/"):
            raise refused(f"{member} is not absolute: {path!r}")
    for index, namespace in enumerate(namespaces):
        if namespace.type not in _NAMESPACES:
            raise refused(f"linux.namespaces[{index}].type is not a known namespace: {namespace.type!r}")
    return OciSpec(
        root_path=root.path,
        hostname=document.hostname,
        terminal=process.terminal,
        mounts=tuple(map(_mount, mounts)),
        namespaces=namespaces,
        devices=linux.devices or (),
        cgroups_path=linux.cgroups_path,
        annotations=document.annotations or {},
        hooks=_checked(document.hooks or NO_HOOKS, refused),
        raw=raw,
        selinux_label=process.selinux_label,
    )


_HOOK_KINDS = msgspec.structs.fields(OciHooks)


def _checked(hooks: OciHooks, refused: Callable[[str], InvalidArgument]) -> OciHooks:
    for kind in _HOOK_KINDS:
        for index, hook in enumerate(getattr(hooks, kind.name) or ()):
            where = f"hooks.{kind.encode_name}[{index}]"
            if not hook.path.startswith("/"):
                raise refused(f"{where}.path is not absolute: {hook.path!r}")
            if hook.timeout is not None and hook.timeout <= 0:
                raise refused(f"{where}.timeout is not above zero: {hook.timeout}")
            if any("=" not in variable.removeprefix("=") for variable in hook.env or ()):
                raise refused(f"{where}.env has an entry that is not NAME=value")
    return hooks


def _mount(mount: _Mount) -> OciMount:
    return OciMount(
        destination=posixpath.normpath(mount.destination),
        type=mount.type,
        source=mount.source,
        options=mount.options or (),
    )
