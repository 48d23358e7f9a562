"""Reads a document (the value of a JSON or YAML text) strictly: finds unknown members, wrong types and bad values.

Every problem names its member, such as `devices[2].containerEdits.env[0]`. As the Go parser does, a number or boolean
is taken where a text is meant (`name: 0`), because YAML spells texts without quotes.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .errors import InvalidSpec
from .spec import ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from .validate import spec_problems

T = TypeVar("T")
_INT64 = 1 << 63
_UINT32 = 1 << 32


def parse_spec(document: object, where: str) -> Spec:
    """The spec in `document`, valid in form and content. Raises InvalidSpec with every problem found."""
    reader = _Reader()
    spec = reader.spec(document)
    # A problem of form would be one of content, too, and is listed once.
    problems = reader.problems or list(spec_problems(spec))
    if problems:
        raise InvalidSpec(where, tuple(problems))
    return spec


class _Reader:
    """After a problem it goes on with a stand-in of the right type."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def spec(self, document: object) -> Spec:
        top = self.members(document, "the document", "cdiVersion kind annotations devices containerEdits")
        for member in ("cdiVersion", "kind", "devices"):
            if isinstance(document, dict) and top.get(member) is None:
                self._say(member, "is missing")
        return Spec(
            cdi_version=self.text(top, "cdiVersion"),
            kind=self.text(top, "kind"),
            annotations=self.texts_by_name(top, "annotations"),
            devices=self.each(top, "devices", self.device),
            container_edits=self.edits(top.get("containerEdits"), "containerEdits"),
        )

    def device(self, value: object, at: str) -> Device:
        found = self.members(value, at, "name annotations containerEdits")
        if isinstance(value, dict):
            for member in ("name", "containerEdits"):
                if found.get(member) is None:
                    self._say(f"{at}.{member}", "is missing")
        return Device(
            name=self.text(found, "name", at),
            annotations=self.texts_by_name(found, "annotations", at),
            container_edits=self.edits(found.get("containerEdits"), f"{at}.containerEdits"),
        )

    def edits(self, value: object, at: str) -> ContainerEdits:
        if value is None:
            return ContainerEdits()
        found = self.members(value, at, "env deviceNodes netDevices mounts hooks intelRdt additionalGids")
        return ContainerEdits(
            env=self.texts(found, "env", at),
            device_nodes=self.each(found, "deviceNodes", self.node, at),
            net_devices=self.each(found, "netDevices", self.net_device, at),
            mounts=self.each(found, "mounts", self.mount, at),
            hooks=self.each(found, "hooks", self.hook, at),
            intel_rdt=None if found.get("intelRdt") is None else self.rdt(found["intelRdt"], f"{at}.intelRdt"),
            additional_gids=self.each(found, "additionalGids", self._gid, at),
        )

    def node(self, value: object, at: str) -> DeviceNode:
        found = self.members(value, at, "path hostPath type major minor fileMode permissions uid gid")
        self._require(value, found, at, "path")
        return DeviceNode(
            path=self.text(found, "path", at),
            host_path=self.text(found, "hostPath", at),
            type=self.text(found, "type", at),
            major=self.number(found, "major", at, least=-_INT64, most=_INT64 - 1),
            minor=self.number(found, "minor", at, least=-_INT64, most=_INT64 - 1),
            file_mode=self.number(found, "fileMode", at, least=0, most=_UINT32 - 1),
            permissions=self.text(found, "permissions", at),
            uid=self.number(found, "uid", at, least=0, most=_UINT32 - 1),
            gid=self.number(found, "gid", at, least=0, most=_UINT32 - 1),
        )

    def net_device(self, value: object, at: str) -> NetDevice:
        found = self.members(value, at, "hostInterfaceName name")
        return NetDevice(
            host_interface_name=self.text(found, "hostInterfaceName", at), name=self.text(found, "name", at)
        )

    def mount(self, value: object, at: str) -> Mount:
        found = self.members(value, at, "hostPath containerPath options type")
        self._require(value, found, at, "hostPath", "containerPath")
        return Mount(
            host_path=self.text(found, "hostPath", at),
            container_path=self.text(found, "containerPath", at),
            options=self.texts(found, "options", at),
            type=self.text(found, "type", at),
        )

    def hook(self, value: object, at: str) -> Hook:
        found = self.members(value, at, "hookName path args env timeout")
        self._require(value, found, at, "hookName", "path")
        return Hook(
            hook_name=self.text(found, "hookName", at),
            path=self.text(found, "path", at),
            args=self.texts(found, "args", at),
            env=self.texts(found, "env", at),
            timeout=self.number(found, "timeout", at, least=-_INT64, most=_INT64 - 1),
        )

    def rdt(self, value: object, at: str) -> IntelRdt:
        members = "closID l3CacheSchema memBwSchema schemata enableMonitoring enableCMT enableMBM"
        found = self.members(value, at, members)
        return IntelRdt(
            clos_id=self.text(found, "closID", at),
            l3_cache_schema=self.text(found, "l3CacheSchema", at),
            mem_bw_schema=self.text(found, "memBwSchema", at),
            schemata=self.texts(found, "schemata", at),
            enable_monitoring=self.boolean(found, "enableMonitoring", at),
            enable_cmt=self.boolean(found, "enableCMT", at),
            enable_mbm=self.boolean(found, "enableMBM", at),
        )

    # Values

    def members(self, value: object, at: str, members: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self._say(at, "is missing" if value is None else "is not an object")
            return {}
        known = members.split()
        for name in value:
            if name not in known:
                member = name if at == "the document" else f"{at}.{name}"
                self._say(str(member)[:200], "is not known")
        return value

    def each(
        self, parent: Mapping[str, Any], name: str, read: Callable[[object, str], T], at: str = ""
    ) -> tuple[T, ...]:
        where = self._at(at, name)
        value = parent.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            self._say(where, "is not a list")
            return ()
        return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(value))

    def text(self, parent: Mapping[str, Any], name: str, at: str = "") -> str:
        value = parent.get(name)
        return "" if value is None else self._text(value, self._at(at, name))

    def texts(self, parent: Mapping[str, Any], name: str, at: str) -> tuple[str, ...]:
        return self.each(parent, name, self._text, at)

    def texts_by_name(self, parent: Mapping[str, Any], name: str, at: str = "") -> dict[str, str]:
        where = self._at(at, name)
        value = parent.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._say(where, "is not an object")
            return {}
        named = ((key, item, f"{where}[{str(key)[:100]!r}]") for key, item in value.items())
        return {self._text(key, at): self._text(item, at) for key, item, at in named}

    def number(self, parent: Mapping[str, Any], name: str, at: str, *, least: int, most: int) -> int | None:
        value = parent.get(name)
        return None if value is None else self._number(value, self._at(at, name), least, most)

    def boolean(self, parent: Mapping[str, Any], name: str, at: str) -> bool:
        value = parent.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._say(self._at(at, name), "is neither true nor false")
        return False

    def _gid(self, value: object, at: str) -> int:
        return self._number(value, at, 0, _UINT32 - 1)

    def _number(self, value: object, at: str, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            self._say(at, "is not a whole number")
            return 0
        if not least <= value <= most:
            self._say(at, f"is out of range: {value if abs(value) < 1 << 70 else 'a huge number'}")
            return 0
        return value

    def _text(self, value: object, at: str) -> str:
        if isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, int) and abs(value) < 1 << 64:
            value = str(value)
        if not isinstance(value, str):
            self._say(at, "is not a text")
            return ""
        if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
            self._say(at, f"is not a text that a kernel takes: {value[:100]!r}")
            return ""
        return value

    def _require(self, value: object, found: Mapping[str, Any], at: str, *members: str) -> None:
        for member in members:
            if isinstance(value, dict) and found.get(member) is None:
                self._say(f"{at}.{member}", "is missing")

    def _at(self, parent: str, name: str) -> str:
        return f"{parent}.{name}" if parent else name

    def _say(self, member: str, problem: str) -> None:
        self.problems.append(f"{member} {problem}")
