"""Writes an installation, all of it or nothing, and removes it.

The manifest names each of our files with the digest of its content. It is written before the files, with former and new
digests, and again after them, so even after a crash the next `install` or `uninstall` finds every file. A file with
another digest was edited, or another program wrote it: then the difference is shown, and no file is changed.
"""

import difflib
import logging
import posixpath
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.node.install.containerd_config import parsed
from pyshim.node.install.daemon_json import with_members
from pyshim.node.install.disk import Disk, Found
from pyshim.node.install.manifest import (
    Manifest,
    ManifestEntry,
    digest_of,
    encoded,
    manifest_path,
    our_part,
    read_manifest,
)
from pyshim.node.install.plan import InstallPlan
from pyshim.node.install.writes import BlockWrite, FileWrite, MembersWrite, PartWrite, Write, with_block, without_block

log = logging.getLogger(__name__)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    before: Found
    after: Found


def foreign_text(disk: Disk, path: str) -> str | None:
    """The text of a file that may have our block, without it; None without such a file."""
    found = disk.read(path)
    if not isinstance(found, tuple):
        return None
    try:
        return without_block(found[0].decode())
    except ValueError as error:
        raise FailedPrecondition(f"read '{path}': {error}") from error


def at_link_targets(plan: InstallPlan, disk: Disk) -> InstallPlan:
    """The plan with our part in the file that a link of another program names, as on NixOS: the link stays.

    Raises FailedPrecondition for links in a loop.
    """
    return replace(
        plan,
        writes=tuple(
            replace(write, path=disk.resolved(write.path)) if isinstance(write, PartWrite) else write
            for write in plan.writes
        ),
    )


def changes(plan: InstallPlan, manifest: Manifest, disk: Disk, *, keep_edited: bool = False) -> tuple[Change, ...]:
    """The files to write and remove, in order; empty if the plan is in place already.

    Raises FailedPrecondition naming each file that is not as we wrote it (with `keep_edited` edited files stay), a link
    in the place of another program's file, a file that would not be TOML any more, and one that cannot be written.
    """
    owned = manifest.by_path()
    found = {path: disk.read(path) for path in (*(write.path for write in plan.writes), *owned)}
    edited = _edited(owned, found)
    whole = [write.path for write in plan.writes if not isinstance(write, PartWrite)]
    _refuse(() if keep_edited else edited, [path for path in whole if path not in owned and found[path] is not None])
    foreign = {path: None if path in owned and not owned[path].is_part else found[path] for path in found}
    for write in plan.writes:
        if isinstance(write, PartWrite) and isinstance(found[write.path], str):
            raise FailedPrecondition(f"change '{write.path}': it is a link, and only the file that it names is changed")
    wanted = [Change(path=write.path, before=found[write.path], after=_after(write, foreign)) for write in plan.writes]
    for change in wanted:
        if change.path.endswith(".toml") and isinstance(change.after, tuple) and change.path not in edited:
            _require_toml(change.path, change.after[0])
    planned = {write.path for write in plan.writes}
    unwanted = [
        Change(path=path, before=found[path], after=_without(entry, found[path]))
        for path, entry in reversed(owned.items())
        if path not in planned and path not in edited
    ]
    todo = [change for change in (*wanted, *unwanted) if change.path not in edited and change.before != change.after]
    for change in todo:
        if disk.is_read_only(change.path):
            hint = "(hint: a file that the system's own configuration generates takes the handlers there)"
            raise FailedPrecondition(f"change '{change.path}': EROFS (read-only file system) {hint}")
    return tuple(todo)


def _require_toml(path: str, content: bytes) -> None:
    """Raises FailedPrecondition if the file with our part would not be TOML: it may define our table inline."""
    try:
        parsed(content.decode(), path)
    except FailedPrecondition as error:
        raise FailedPrecondition(
            f"add to '{path}': with our part it would not be TOML: {str(error).partition(': ')[2]}"
            " (hint: an inline table, key = {...}, takes no additions: write it as a [table])"
        ) from error


def _edited(owned: Mapping[str, ManifestEntry], found: Mapping[str, Found]) -> list[str]:
    """The paths of our files that were edited."""
    return sorted(path for path, entry in owned.items() if entry.state(found[path]) == "edited")


def _refuse(edited: Iterable[str], foreign: Iterable[str] = ()) -> None:
    """Raises FailedPrecondition for edited files of ours, and for files of others in the place of ours."""
    problems = [f"'{path}' is not as 'pyshim install' wrote it" for path in edited]
    problems += [f"'{path}' exists, and 'pyshim install' did not write it" for path in foreign]
    if problems:
        hint = "(hint: undo the edit or move the file away; settings of your own go into config.d; --keep-edited)"
        raise FailedPrecondition(f"change the installation: {'; '.join(problems)} {hint}")


def edits(plan: InstallPlan, manifest: Manifest, disk: Disk) -> list[str]:
    """The differences between present and planned text, for each file that is not as we wrote it."""
    owned = manifest.by_path()
    lines: list[str] = []
    for write in plan.writes:
        found = disk.read(write.path)
        entry = owned.get(write.path)
        part = _part(write, found)
        if part is None or (entry is not None and entry.state(found) == "ok"):
            continue
        after = _part(write, _after(write, {write.path: found})) or ""
        lines += difflib.unified_diff(
            part.splitlines(keepends=True), after.splitlines(keepends=True), write.path, f"{write.path} (ours)"
        )
    return lines


def apply(
    plan: InstallPlan,
    disk: Disk,
    *,
    make_release: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    rolled_back: Callable[[], None] = lambda: None,
    keep_edited: bool = False,
) -> tuple[Change, ...]:
    """The node is as `plan` has it, and `check` has passed; on any error the node is as it was. Returns the changes.

    `make_release` fills the directory that it is given. `rolled_back` is called after the undo of files that `check`
    may have seen. Raises what they raise, ShimError, OSError.
    """
    manifest = read_manifest(disk, plan.prefix) or Manifest()
    todo = changes(plan, manifest, disk, keep_edited=keep_edited)
    has_release = disk.is_directory(plan.release_path)
    if not todo and has_release and manifest.is_complete:
        check()
        return ()
    undo = _Undo(disk)
    checked = False
    try:
        places = [manifest_path(plan.prefix), plan.release_path, *(change.path for change in todo if change.after)]
        missing = _missing_directories(disk, places)
        begun = _begun(plan, manifest, missing, disk)
        for path in (path for path in missing if _is_within(plan.prefix, path)):
            undo.make_directory(path)
        undo.write(manifest_path(plan.prefix), encoded(begun))
        for path in (path for path in missing if not _is_within(plan.prefix, path)):
            undo.make_directory(path)
        if not has_release:
            undo.make_tree(plan.release_path, make_release)
        for change in todo:
            undo.write(change.path, change.after)
        checked = True
        check()
        undo.write(manifest_path(plan.prefix), encoded(_finished(plan, begun, disk)))
    except BaseException as error:
        undo.all(error)
        if checked:
            try:
                rolled_back()
            except (OSError, ShimError) as failed:
                error.add_note(f"undo failed: {failed}")
        raise
    return todo


def remove(disk: Disk, prefix: str, *, keep_edited: bool = False) -> tuple[Change, ...]:
    """Nothing that `install` wrote is left; after an error all files are back. Returns the changes.

    Releases are removed last and are not restored. Raises FailedPrecondition for files that were edited; with
    `keep_edited` they stay, and are the operator's.
    """
    manifest = read_manifest(disk, prefix)
    if manifest is None:
        return ()
    owned = manifest.by_path()
    found = {path: disk.read(path) for path in owned}
    edited = _edited(owned, found)
    _refuse(() if keep_edited else edited)
    todo = [
        Change(path=path, before=found[path], after=_without(entry, found[path]))
        for path, entry in reversed(owned.items())
        if found[path] is not None and path not in edited
    ]
    undo = _Undo(disk)
    try:
        for change in todo:
            undo.write(change.path, change.after)
    except BaseException as error:
        undo.all(error)
        raise
    if disk.is_directory(f"{prefix}/releases"):
        disk.remove_tree(f"{prefix}/releases")
    disk.write(manifest_path(prefix), None)
    for path in reversed(manifest.directories):
        try:
            disk.remove_directory(path)
        except OSError as error:
            log.info("directory stays", extra={"path": path, "error": describe_os_error(error)})
    return tuple(todo)


class _Undo:
    """Changes that can be undone, the last one first."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._steps: list[Callable[[], None]] = []

    def write(self, path: str, found: Found) -> None:
        before = self._disk.read(path)
        if before == found:
            return
        self._disk.write(path, found)
        self._steps.append(lambda: self._disk.write(path, before))

    def make_directory(self, path: str) -> None:
        self._disk.make_directory(path)
        self._steps.append(lambda: self._disk.remove_directory(path))

    def make_tree(self, path: str, fill: Callable[[str], None]) -> None:
        aside = f"{path}~"
        if self._disk.is_directory(aside):  # left by an installation that was killed
            self._disk.remove_tree(aside)
        try:
            fill(aside)
            self._disk.move(aside, path)
        except BaseException:
            if self._disk.is_directory(aside):
                self._disk.remove_tree(aside)
            raise
        self._steps.append(lambda: self._disk.remove_tree(path))

    def all(self, error: BaseException) -> None:
        """Every change was undone, or its failure is a note on `error`."""
        while self._steps:
            try:
                self._steps.pop()()
            except (OSError, ShimError) as failed:
                error.add_note(f"undo failed: {failed}")


def _begun(plan: InstallPlan, manifest: Manifest, missing: list[str], disk: Disk) -> Manifest:
    """The manifest while files may be old or new."""
    old = manifest.by_path()
    entries = dict(old)
    for write in plan.writes:
        before = old[write.path].digests if write.path in old else ()
        new = digest_of(_part(write, _after(write, {})) or "")
        entries[write.path] = ManifestEntry(
            path=write.path,
            digests=tuple(dict.fromkeys((*before, new))),
            is_block=isinstance(write, BlockWrite),
            before=_text_before(write, old.get(write.path), disk),
            members=(*write.members, *write.former) if isinstance(write, MembersWrite) else (),
        )
    return replace(
        manifest,
        is_complete=False,
        entries=tuple(entries.values()),
        directories=tuple(dict.fromkeys((*manifest.directories, *missing))),
    )


def _text_before(write: Write, entry: ManifestEntry | None, disk: Disk) -> str | None:
    """The text before our part, in a file of ours; None in a file of others."""
    if not isinstance(write, PartWrite):
        return None
    if entry is not None and entry.is_part:
        return entry.before
    return write.before if entry is not None or disk.read(write.path) is None else None


def _finished(plan: InstallPlan, begun: Manifest, disk: Disk) -> Manifest:
    """The manifest with one digest for each file. A file that stays edited keeps its former digests."""
    entries, written = [], begun.by_path()
    for write in plan.writes:
        entry = written[write.path]
        digest = digest_of(_part(write, disk.read(write.path)) or "")
        names = tuple(write.members) if isinstance(write, MembersWrite) else ()
        entries.append(replace(entry, digests=(digest,), members=names) if digest in entry.digests else entry)
    return Manifest(release=plan.release.id, entries=tuple(entries), directories=begun.directories)


def _part(write: Write, found: Found) -> str | None:
    """The part of `found` that `write` makes."""
    names = tuple(write.members) if isinstance(write, MembersWrite) else ()
    return our_part(found, is_block=isinstance(write, BlockWrite), members=names)


def _after(write: Write, found: Mapping[str, Found]) -> Found:
    if isinstance(write, FileWrite):
        return write.content.encode(), write.mode
    if isinstance(write, PartWrite):
        before = found.get(write.path)
        content, mode = before if isinstance(before, tuple) else (write.before.encode(), 0o644)
        text = content.decode()
        if isinstance(write, MembersWrite):
            return with_members(text, write.members, write.former).encode(), mode
        return with_block(without_block(text), write.body, first=write.first).encode(), mode
    return write.target


def _without(entry: ManifestEntry, found: Found) -> Found:
    if not entry.is_part or not isinstance(found, tuple):
        return None
    before = found[0].decode()
    text = without_block(before) if entry.is_block else with_members(before, {}, entry.members)
    return None if text == entry.before else (text.encode(), found[1])


def _missing_directories(disk: Disk, paths: Iterable[str]) -> list[str]:
    """The directories above `paths` that are not there, the outer before the inner."""
    missing: set[str] = set()
    for path in paths:
        above = posixpath.dirname(path)
        while above != "/" and not disk.is_directory(above):
            missing.add(above)
            above = posixpath.dirname(above)
    return sorted(missing)


def _is_within(prefix: str, path: str) -> bool:
    """The path is the prefix, above it or below it. Such directories are made before the manifest is written."""
    return path == prefix or path.startswith(f"{prefix}/") or prefix.startswith(f"{path}/")
