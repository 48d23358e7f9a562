"""Applies a pod's annotations to its sandbox's configuration, by Kata's rules.

Annotations under `io.katacontainers.config.hypervisor.` need the file's permission (enable_annotations); those for
runtime and agent only where their value takes a wall down (enable_wall_annotations). Values are checked like those of a
file. An annotation that is not permitted is an error.

Among them are Kata's asset hashes: a pod gives the SHA-512 of its kernel, image or hypervisor, and starts with no other
file. Digests are stored on disk (`host/file_answers.py`): images have hundreds of megabytes, and each pod is a new
process.
"""

import difflib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from msgspec.structs import replace

from pyshim.config.catalogue import annotated
from pyshim.config.effective import Effective, Finding, Level, Setting, contradictions, derived
from pyshim.config.keys import ANNOTATION_PREFIX, Key, Table, Verdict
from pyshim.config.values import PATH
from pyshim.host.file_answers import FileAnswers, file_identity
from pyshim.host.os_errors import os_errors
from pyshim.model.config import (
    FILE_SYSTEM_OPTION_PREFIX,
    HYPERVISOR_PREFIX,
    SWAP_IN_BYTES_ANNOTATION,
    SWAPPINESS_ANNOTATION,
)
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.vm import split_params

HASHED_ASSETS: Mapping[str, str] = {
    "kernel_hash": "kernel",
    "image_hash": "image",
    "initrd_hash": "initrd",
    "firmware_hash": "firmware",
    "firmware_volume_hash": "firmware_volume",
    "hypervisor_hash": "path",
    "path_hash": "path",
    "jailer_hash": "jailer_path",
}
"""The key of the file, by the annotation's name without HYPERVISOR_PREFIX. `path` has two annotations."""
CACHE_DIR = "/run/pyshim/asset-hashes"
HASH_TYPES = ("io.katacontainers.asset_hash_type", f"{HYPERVISOR_PREFIX}asset_hash_type")
"""The annotations of Kata's Go and Rust runtimes for the type of the hashes."""
_DIGEST = re.compile("[0-9a-fA-F]{128}")
_CHUNK_BYTES = 1 << 20


def verify_assets(effective: Effective, annotations: Mapping[str, str], cache_dir: str = CACHE_DIR) -> None:
    """Every file with a hash annotation has that hash. Raises InvalidArgument naming file and annotation if not."""
    wanted = {
        name: annotations[HYPERVISOR_PREFIX + name] for name in HASHED_ASSETS if HYPERVISOR_PREFIX + name in annotations
    }
    for name in HASH_TYPES:
        kind = annotations.get(name, "sha512")
        if kind != "sha512":
            raise InvalidArgument(f"read annotation '{name}': {kind[:100]!r} is not \"sha512\", the only type")
    answers = FileAnswers(cache_dir)
    for name, expected in wanted.items():
        annotation, key = HYPERVISOR_PREFIX + name, HASHED_ASSETS[name]
        if not _DIGEST.fullmatch(expected):
            raise InvalidArgument(f"read annotation '{annotation}': not a SHA-512 in 128 hexadecimal digits")
        path = effective.of(Table.HYPERVISOR, key).value
        if not path:
            raise InvalidArgument(f"verify annotation '{annotation}': {key} in '{effective.source.path}' names no file")
        actual = sha512_of(path, answers)
        if actual != expected.lower():
            demanded = f"{expected[:16]}... as annotation '{annotation}' demands"
            raise InvalidArgument(f"verify {key} '{path}': its sha512 is {actual[:16]}..., not {demanded}")


def sha512_of(path: str, answers: FileAnswers) -> str:
    """The file's SHA-512 in hexadecimal digits; from `answers` if the same file was read before."""
    with os_errors(f"verify '{path}'"), open(path, "rb") as file:
        before = os.fstat(file.fileno())
        if _DIGEST.fullmatch(known := answers.stored(before)):
            return known
        digest = hashlib.sha512()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        after = os.fstat(file.fileno())
    if file_identity(before) != file_identity(after):
        raise FailedPrecondition(f"verify '{path}': it changed while it was read")
    answers.store(after, digest.hexdigest())
    return digest.hexdigest()


PREFIX = "io.katacontainers.config."
HYPERVISOR_NAME = PREFIX + "runtime.hypervisor_name"

_WITHOUT_EFFECT = {
    PREFIX + "agent.cdh_api_timeout": "Kata documents it and reads cdh_api_timeout_ms only",
    "io.katacontainers.config_path": "removed from Kata: a pod does not choose the node's configuration",
}
_NOT_CONFIGURATION = tuple(f"{ANNOTATION_PREFIX}{group}." for group in ("pkg", "volume", "image"))
"""Prefixes of annotations that set no key: runtimes and snapshotters use them."""
PATH_LISTS: Mapping[str, str] = {
    "path": "valid_hypervisor_paths",
    "jailer_path": "valid_jailer_paths",
    "virtio_fs_daemon": "valid_virtio_fs_daemon_paths",
    "vhost_user_store_path": "valid_vhost_user_store_paths",
    "entropy_source": "valid_entropy_sources",
    "kernel": "valid_kernel_paths",
    "image": "valid_image_paths",
    "initrd": "valid_initrd_paths",
    "firmware": "valid_firmware_paths",
}
"""For each path that an annotation can set, the key with the patterns of its permitted values."""
_NEVER_ALLOWED: Mapping[str, str] = {
    "sandbox_bind_mounts": "a pod does not choose what of its node is shown to the guest"
}
"""Keys whose annotation is always refused, with the reason. Kata ignores this annotation with a warning."""
WALLS: Mapping[str, tuple[Any, str] | None] = {
    "hypervisor_name": None,  # a table of the node's file
    "name": None,
    "agent_name": None,
    "internetworking_model": None,  # "none" leaves the VM without a network
    "disable_new_netns": (True, "QEMU would be in the host's network namespace"),
    "sandbox_cgroup_only": (False, "processes and memory of the VM would be outside the pod's cgroup"),
    "enable_vcpus_pinning": None,  # on CPUs of the pod's cgroup
    "vfio_mode": None,  # of devices that the pod has
    "create_container_timeout": None,
    "disable_guest_seccomp": None,  # inside the guest
    "sandbox_bind_mounts": None,  # always refused
    "shared_mounts": None,
    "experimental": None,
    "experimental_force_guest_pull": None,
    "guest_selinux_label": None,
    "enable_pprof": None,  # to those who reach the monitor's socket: root
    "enable_tracing": None,  # to the node's collector
    "kernel_modules": None,  # inside the guest
    "cdh_api_timeout": None,
    "policy": None,  # inside the guest
}
"""For each key of runtime and agent that an annotation can set: the value that takes a wall around the VM down, and
which; None if no value does."""
_ANY_IF_UNLISTED = frozenset({"kernel", "image", "initrd", "firmware"})
"""Keys whose empty list permits any file, as in Kata, which has no lists for them."""


def with_annotations(
    effective: Effective, annotations: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists
) -> Effective:
    """`effective` with the annotations' values. `exists` looks for files on the pod's node.

    Raises InvalidArgument naming annotation, rule and file.
    """
    changed: dict[tuple[Table, str], Setting] = {}
    findings: list[Finding] = []
    for name in sorted(annotations):
        if name.startswith(HYPERVISOR_PREFIX):
            _check_enabled(effective, name)
        key = annotated().get(name)
        if key is not None:
            key = effective.of(key.table, key.name).key
            setting = _overridden(effective, key, name, annotations[name], exists)
            _check_one_spelling(changed.get((key.table, key.name)), setting)
            changed[key.table, key.name] = setting
            if key.verdict is Verdict.NO_EFFECT:
                findings.append(_finding(name, Verdict.NO_EFFECT, key.why, setting.value != key.default))
        else:
            findings += _check_other(name)
    if not changed and not findings:
        return effective
    _reset_other_plug_way(effective, changed)
    result = replace(effective.with_settings(changed), findings=(*effective.findings, *findings))
    result = result.with_settings(derived(result.settings, result.hypervisor, result.architecture))
    for problem in contradictions(result.settings, result.hypervisor):
        names = ", ".join(sorted(setting.annotation for setting in changed.values()))
        raise InvalidArgument(f"apply annotations {names}: {problem.subject}: {problem.text}")
    return result


def path_is_listed(path: str, patterns: Iterable[str]) -> bool:
    """A pattern matches `path`. As in a shell, `*` does not match a slash."""
    names = path.split("/")
    for pattern in patterns:
        parts = pattern.replace("[^", "[!").split("/")
        if len(parts) == len(names) and all(map(fnmatchcase, names, parts)):
            return True
    return False


def _check_enabled(effective: Effective, name: str) -> None:
    rule = effective.of(Table.HYPERVISOR, "enable_annotations")
    anchored = effective.of(Table.HYPERVISOR, "annotation_match").value == "anchored"
    match = re.fullmatch if anchored else re.search
    suffix = name.removeprefix(HYPERVISOR_PREFIX)
    if not any(match(pattern, suffix) for pattern in rule.value):
        raise InvalidArgument(
            f"refuse annotation '{name}': not enabled by {_rule(effective, rule)}{' (anchored)' if anchored else ''}"
        )


def _rule(effective: Effective, setting: Setting) -> str:
    listed = ", ".join(f'"{item}"' for item in setting.value)
    where = f"'{setting.place}'" if setting.place else f"'{effective.source.path}'"
    return f"{setting.key.name} = [{listed}] in {where}"


def _overridden(effective: Effective, key: Key, name: str, text: str, exists: Callable[[str], bool]) -> Setting:
    if key.name in _NEVER_ALLOWED:
        raise InvalidArgument(f"refuse annotation '{name}': {_NEVER_ALLOWED[key.name]}")
    if "\0" in text:
        raise InvalidArgument(f"read annotation '{name}': contains a NUL character")
    try:
        value = key.kind_under(name).convert_text(text)
        value = key.default if key.is_blank(value) else value
    except ValueError as exc:
        raise InvalidArgument(f"read annotation '{name}': {exc}") from exc
    old = effective.of(key.table, key.name)
    if key.kind is PATH:
        _check_path(effective, old, name, value, exists)
    _check_wall(effective, old, name, value)
    if key.name == "kernel_params":
        try:
            value = _merged_params(old.value, value)
        except InvalidArgument as exc:
            raise InvalidArgument(f"apply annotation '{name}': {exc}") from exc
    return Setting(key=key, value=value, place=None, annotation=name, is_default=False)


def _check_wall(effective: Effective, old: Setting, name: str, value: Any) -> None:
    wall = WALLS.get(old.key.name) if old.key.table is not Table.HYPERVISOR else None
    if wall is None or value != wall[0] or value == old.value:
        return
    rule = effective.of(Table.RUNTIME, "enable_wall_annotations")
    if old.key.name not in rule.value:
        raise InvalidArgument(f"refuse annotation '{name}': {wall[1]}, and it is not in {_rule(effective, rule)}")


def _check_path(effective: Effective, old: Setting, name: str, path: str, exists: Callable[[str], bool]) -> None:
    list_name = PATH_LISTS.get(old.key.name)
    if list_name is not None and path != old.value:
        rule = effective.of(Table.HYPERVISOR, list_name)
        permits_any = not rule.value and old.key.name in _ANY_IF_UNLISTED
        if not permits_any and not path_is_listed(path, rule.value):
            raise InvalidArgument(f"refuse annotation '{name}': '{path}' is not in {_rule(effective, rule)}")
    if path and (not path.startswith("/") or os.path.normpath(path) != path):
        raise InvalidArgument(f"refuse annotation '{name}': '{path}' is not an absolute path in its shortest form")
    if path and old.key.verdict is Verdict.HONOURED and not exists(path):
        raise InvalidArgument(f"read annotation '{name}': '{path}' does not exist")


def _merged_params(file: str, annotation: str) -> str:
    """The annotation's parameters, after those of the file whose names it does not have."""
    own = split_params(annotation)
    replaced = {param.partition("=")[0] for param in own}
    kept = (param for param in split_params(file) if param.partition("=")[0] not in replaced)
    return " ".join((*kept, *own))


def _check_one_spelling(first: Setting | None, second: Setting) -> None:
    if first is not None and first.value != second.value:
        raise InvalidArgument(
            f"read annotation '{second.annotation}': contradicts '{first.annotation}', which is the same key"
        )


def _check_other(name: str) -> list[Finding]:
    """The findings about an annotation that overrides no key. Raises InvalidArgument if it must not be ignored."""
    if name in HASH_TYPES or (name.startswith(HYPERVISOR_PREFIX) and name[len(HYPERVISOR_PREFIX) :] in HASHED_ASSETS):
        return []  # `verify_assets` reads them
    if name in _WITHOUT_EFFECT:
        return [_finding(name, Verdict.NO_EFFECT, _WITHOUT_EFFECT[name], True)]
    if name.startswith(FILE_SYSTEM_OPTION_PREFIX):
        raise InvalidArgument(
            f"read annotation '{name}': layers that a block snapshotter describes by annotations are not supported"
        )
    if name in (SWAPPINESS_ANNOTATION, SWAP_IN_BYTES_ANNOTATION):
        return []  # they belong to containers
    if name.startswith(PREFIX) or (name.startswith(ANNOTATION_PREFIX) and not name.startswith(_NOT_CONFIGURATION)):
        near = difflib.get_close_matches(name, annotated(), n=1, cutoff=0.93)
        hint = f" (did you mean {near[0]}?)" if near else ""
        if name.startswith(HYPERVISOR_PREFIX):
            raise InvalidArgument(f"read annotation '{name}': it is not a known annotation{hint}")
        return [_finding(name, Verdict.UNKNOWN, f"is not a known annotation{hint}", True)]
    return []


def _finding(name: str, verdict: Verdict, text: str, differs: bool) -> Finding:
    level = Level.WARNING if verdict is Verdict.UNKNOWN else Level.NOTE
    return Finding(level, f"annotation {name}", text, verdict, differs=differs)


def _reset_other_plug_way(effective: Effective, changed: dict[tuple[Table, str], Setting]) -> None:
    """Adds `no-port` for the other key if an annotation sets only one of cold_plug_vfio and hot_plug_vfio."""
    names = ("cold_plug_vfio", "hot_plug_vfio")
    for name, other in (names, names[::-1]):
        setting = changed.get((Table.HYPERVISOR, name))
        if setting is not None and setting.value != "no-port" and (Table.HYPERVISOR, other) not in changed:
            old = effective.of(Table.HYPERVISOR, other)
            changed[Table.HYPERVISOR, other] = old._replace(value="no-port", annotation=setting.annotation)
