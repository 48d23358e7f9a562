"""Writes the configuration's reference from the tables of keys, and the table of deadlines.

    python -m scripts.config_reference > docs/CONFIGURATION.md
    python -m scripts.config_reference --toml > configs/configuration-reference.toml

A deadline ends a wait for a hung program. Each is several times the longest wait seen on a busy host. A test compares
the table with the constants in the code.
"""

import sys
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from pyshim.config.annotations import HASHED_ASSETS, PATH_LISTS
from pyshim.config.catalogue import GROUPS, KEYS
from pyshim.config.keys import Alias, Dialect, Key, Table, Verdict, document_table
from pyshim.config.keys_devices import REMOTE
from pyshim.config.keys_runtime import REMOVED, REMOVED_TABLES
from pyshim.config.sources import DEFAULT_PATHS, MAX_CONFIG_BYTES
from pyshim.config.values import toml_value

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m scripts.config_reference`; change the key table in pyshim/config/, not this file. -->

pyshim reads Kata Containers' configuration files, those of the Go runtime and those of the Rust runtime, unchanged.
Keys that only differ in name or table between the two are accepted in both places. Two commands explain a file:

- `pyshim config check [FILE]` prints the effect of each key, with file and line. It also plans an empty pod, as
  `pyshim plan` does, and prints the error if that fails. It exits 1 if no sandbox starts with the file on this host
  (`--elsewhere`: on a host that has what the file needs).
- `pyshim config show [FILE]` prints the effective configuration and the origin of every value, with
  `--annotation NAME=VALUE` for a pod with that annotation.

## Which file is read

1. The file that containerd's runtime handler names (`ConfigPath`), or the text in the handler (`config_body`).
2. The file in the environment variable `KATA_CONF_FILE` of the shim, if it is one of the paths below.
3. The first of these that exists:
{paths}
4. The file shipped with pyshim.

Symbolic links of the file are resolved. Then the drop-ins `config.d/*.toml` beside the resolved file are read in the
order of their names: tables merge, values and whole lists replace. Other files in `config.d` are not read. No file may
be larger than {limit} bytes. The files are read when a sandbox starts; running sandboxes keep their configuration.

## Effect of a key

- **honoured**: pyshim acts on it.
- **no effect**: accepted and checked, but without effect, for the reason given. A value other than the default is a
  warning at each sandbox's start.
- **refused**: only the default is accepted. No sandbox starts with another value, which asks for safety or devices that
  pyshim does not offer yet. The same holds for the values of a choice that are listed as refused.
- **removed**, **unknown**: a warning at each sandbox's start, with the nearest known name.

A value of the wrong type or out of range is an error that names key, file and line. Numbers are exact: `0.1` is a
tenth. Two spellings of a key with different values in the same file are an error; a drop-in's value replaces the
file's. A path that starts with a dot is relative to the file.

"""

_ANNOTATIONS = """\
## Annotations

A pod's annotation overrides the file, with the same types and ranges. containerd only passes annotations on if its
configuration allows that: `pod_annotations = ["io.katacontainers.*"]` of the runtime handler.

- Names under `io.katacontainers.config.hypervisor.` need the file's permission: an expression of `enable_annotations`
  must match the rest of the name. As in Kata, it may match any part (`path` enables `jailer_path`, too), unless
  `annotation_match = "anchored"` is set, as in the shipped files. No sandbox starts with an annotation that is not
  enabled.
- Names under `io.katacontainers.config.runtime.` and `io.katacontainers.config.agent.` need no permission, but for two
  values that take a wall around the VM down: `disable_new_netns` true and `sandbox_cgroup_only` false, where the file
  has the other value. `enable_wall_annotations` permits them, by name.
- A path must exist, and it must match the list named below or be that of the file. In the lists, `*` does not match a
  slash.
- Booleans are `true` or `false`; lists are JSON or comma-separated; memory is in MiB or has a unit (`2 GiB`).
- Parameters in `kernel_params` replace those of the same name in the file; the file's other parameters stay.
- An unknown name under `io.katacontainers.config.hypervisor.` is an error, any other under `io.katacontainers.` a
  warning.

| annotation | key | paths from |
|---|---|---|
"""

_DEADLINES = """
## Deadlines

pyshim treats another program as hung after these times. [REMOTE.md](REMOTE.md) has the deadlines of remote VMs.

| pyshim waits for | seconds | then |
|---|---|---|
"""

_HASHES = """
### Hashes of files

A pod can demand a certain file: the annotation has its SHA-512 in hexadecimal digits, and the sandbox does not start
with another file. `io.katacontainers.asset_hash_type`, or `asset_hash_type` under the prefix below, may be `sha512`,
the only type.

| annotation | file of |
|---|---|
"""
_TOML_WIDTH = 116
_NEEDED = {"kernel": "../.build/guest/vmlinux", "image": "../.build/guest/rootfs.img"}
"""Values of configuration-qemu.toml for the keys without which no sandbox starts."""


class WaitLimit(NamedTuple):
    """One deadline. Either `key` of `table` sets it, or the code's `constant` has the value `seconds`."""

    waits_for: str
    then: str
    """What happens at the deadline."""
    constant: str = ""
    """Dotted, with its module."""
    seconds: float = 0.0
    table: Table = Table.HYPERVISOR
    key: str = ""


_START, _CALL = "the sandbox does not start", "the call fails"

DEADLINES: tuple[WaitLimit, ...] = (
    WaitLimit("reading files, cgroups, device nodes", _CALL, "pyshim.concurrency.deadlines.READ_S", 30),
    WaitLimit("one change on the host: mount, cgroup, directory", _CALL, "pyshim.concurrency.deadlines.CHANGE_S", 30),
    WaitLimit(
        "virtiofsd to report which of the two programs it is",
        _START,
        "pyshim.resources.volumes.host.virtiofsd_flavours._PROBE_TIMEOUT_S",
        25,
    ),
    WaitLimit("an OCI hook without a timeout", "it is killed", "pyshim.host.processes.hooks.DEFAULT_TIMEOUT_S", 120),
    WaitLimit("the pod's network namespace", _START, "pyshim.resources.network.host.pod_network.TIMEOUT_S", 30),
    WaitLimit("the search for the pod's devices", _START, "pyshim.resources.devices.host.finder.TIMEOUT_S", 25),
    WaitLimit("QEMU's greeting, or vhost-device-vsock's connection", _START, key="start_timeout"),
    WaitLimit(
        "QEMU's greeting with passed-through devices, at least",
        _START,
        "pyshim.resources.devices.plan.devices.PASSING_TIMEOUT_S",
        120,
    ),
    WaitLimit("QEMU's answer to a command", _CALL, "hypervisors.qemu.qmp.COMMAND_TIMEOUT_S", 25),
    WaitLimit("the program that serves a disk, during plugging", _CALL, "hypervisors.qemu.disks.ANSWER_TIMEOUT_S", 10),
    WaitLimit("QEMU to plug a passed-through device", _CALL, "hypervisors.qemu.pci.VFIO_TIMEOUT_S", 120),
    WaitLimit("the guest to release a device", _CALL, "hypervisors.qemu.qmp.UNPLUG_TIMEOUT_S", 15),
    WaitLimit("virtio-mem to grow", _CALL, "hypervisors.qemu.memory.TOTAL_TIMEOUT_S", 120),
    WaitLimit("one CONNECT of a hybrid vsock", "it is repeated", "pyshim.agent.connect.HANDSHAKE_S", 10),
    WaitLimit("the first answer of the guest's agent", _START, table=Table.AGENT, key="dial_timeout"),
    WaitLimit(
        "the same under emulation, if the key is below 10 s",
        _START,
        "pyshim.pod.plan.sandbox.EMULATED_BOOT_S",
        60,
    ),
    WaitLimit("a device to appear in the guest", _CALL, table=Table.AGENT, key="hotplug_timeout"),
    WaitLimit("the guest to put vCPUs online", _CALL, "guest.agent.calls.sandbox._ONLINE_TIMEOUT_S", 30),
    WaitLimit("a file system's driver in the guest", _CALL, "guest.agent.mounts._DRIVER_WAIT_S", 30),
    WaitLimit("the agent's answer to CreateContainer", _CALL, table=Table.RUNTIME, key="create_container_timeout"),
    WaitLimit("the agent's answer to another request", _CALL, table=Table.AGENT, key="request_timeout"),
    WaitLimit("the guest to end its sandbox", "the VM is ended", "pyshim.pod.sandbox.DESTROY_TIMEOUT_S", 3),
    WaitLimit("QEMU to end after `quit`", "it is killed", "hypervisors.qemu.process.QUIT_GRACE_S", 2),
    WaitLimit("one step of an undo", "it stays in the ledger", "pyshim.concurrency.deadlines.UNDO_S", 10),
)


def markdown() -> str:
    """The text of docs/CONFIGURATION.md."""
    paths = "\n".join(f"   - `{path}`" for path in DEFAULT_PATHS)
    text = _INTRODUCTION.format(paths=paths, limit=MAX_CONFIG_BYTES)
    for title, keys in GROUPS:
        hypervisor = "remote" if keys is REMOTE else "qemu"
        text += f"## {title}: `[{document_table(keys[0].table, hypervisor)}]`\n\n"
        text += "| key | value | default | meaning | effect |\n|---|---|---|---|---|\n"
        text += "".join(_row(key) for key in keys) + "\n"
    text += _ANNOTATIONS
    text += "".join(
        f"| `{name}` | `{key.dotted}` | {f'`{PATH_LISTS[key.name]}`' if key.name in PATH_LISTS else ''} |\n"
        for key in KEYS
        for name in key.annotations
    )
    text += _HASHES
    text += "".join(
        f"| `io.katacontainers.config.hypervisor.{name}` | `{key}` |\n" for name, key in HASHED_ASSETS.items()
    )
    text += _DEADLINES + "".join(_deadline(each) for each in DEADLINES)
    return text + "\n## Removed\n\n" + "".join(_removed())


def commented_toml() -> str:
    """The text of configs/configuration-reference.toml: every key with its default and its meaning."""
    lines = [
        "# Every key with its default and its meaning. Written by scripts/config_reference.py.",
        "# Kernel and image have no default: the values are the files that `make guest` builds. For a configuration of",
        "# your own, copy configuration-qemu.toml instead.",
    ]
    for table in Table:
        lines += ["", f"[{document_table(table)}]"]
        for title, keys in GROUPS:
            rows = [key for key in keys if key.table is table]
            if rows:
                lines += ["", f"## {title}"]
            for key in rows:
                value = _NEEDED.get(key.name, key.default)
                lines += ["", *_comment(key), f"{key.name} = {toml_value(value)}"]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    name = f"`{key.name}`" + ("" if key.dialect is Dialect.KATA else f"<br>({key.dialect})")
    name += "".join(f"<br>{_also(alias)} `{_name(alias, key)}`{_unit(alias, key)}" for alias in key.aliases)
    effect = f"**{key.verdict}**" + (f": {key.why}" if key.why else "")
    cells = (name, _values(key), f"`{toml_value(key.default)}`", key.meaning, effect)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _deadline(each: WaitLimit) -> str:
    key = next((key for key in KEYS if (key.table, key.name) == (each.table, each.key)), None)
    seconds = f"{each.seconds:g}" if key is None else f"`{key.name}`, {float(key.default):g} by default"
    return f"| {each.waits_for} | {seconds} | {each.then} |\n"


def _comment(key: Key) -> Iterator[str]:
    yield from _wrapped(key.meaning)
    aliases = "".join(f" {_also(alias).capitalize()} {_name(alias, key)}{_unit(alias, key)}." for alias in key.aliases)
    yield from _wrapped(f"{_values(key)}.{aliases}")
    if key.dialect is not Dialect.KATA:
        yield f"# A key of {key.dialect}'s."
    if key.verdict is Verdict.NO_EFFECT:
        yield from _wrapped(f"NO EFFECT: {key.why}.")
    elif key.verdict is Verdict.REFUSED:
        yield from _wrapped(f"REFUSED unless it is the default: {key.why}.")


def _wrapped(text: str) -> Iterator[str]:
    return (f"# {line}" for line in textwrap.wrap(text, _TOML_WIDTH, break_long_words=False))


def _values(key: Key) -> str:
    """The type, range and unit of the key's values."""
    text = key.kind.type_name + (f", {key.kind.allowed}" if key.kind.allowed else "")
    text += f"; {toml_value(key.blank)}: the default" if key.blank is not None else ""
    return text + (f" ({key.kind.unit})" if key.kind.unit else "")


def _name(alias: Alias, key: Key) -> str:
    return alias.name if alias.table is key.table else f"[{document_table(alias.table)}] {alias.name}"


def _also(alias: Alias) -> str:
    return "formerly" if alias.is_former else "also"


def _unit(alias: Alias, key: Key) -> str:
    return f" in {alias.kind.unit}" if alias.kind.unit != key.kind.unit else ""


def _removed() -> Iterator[str]:
    for (table, name), instead in REMOVED.items():
        yield f"- `{document_table(table)}.{name}`: {instead}\n"
    for name, instead in REMOVED_TABLES.items():
        yield f"- `[{name}]`: {instead}\n"


if __name__ == "__main__":
    print(commented_toml() if sys.argv[1:] == ["--toml"] else markdown(), end="")
