"""Unpacks layers on top of each other into one directory. Source: OCI image specification, layer.md.

Unpacking happens in a chroot of that directory, so no name and no link in a layer leads out of it. A directory gets its
final name after every digest was right: an incomplete or wrong one is never used.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import zlib
from gzip import BadGzipFile, GzipFile

from guest.agent.files import remove_tree
from guest.agent.pull.sources import Blob, ImageSource, Layer, PullError, Reference, image_of

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_XATTR = "SCHILY.xattr."
_PIECE_BYTES = 256 << 10


def make_image(source: ImageSource, name: str, images: str) -> str:
    """The directory with the files of image `name`, made unless it is there. Raises PullError or OSError."""
    image = image_of(source, name)
    root = f"{images}/{image.digest.partition(':')[2]}"
    if os.path.isdir(root):
        return root
    making = f"{root}.{os.getpid()}"
    os.makedirs(making, 0o755)
    try:
        for layer in image.layers:
            blob = source.blob(Reference(name), layer.digest)
            try:
                unpack(blob, layer, making)
            finally:
                blob.close()
        try:
            os.rename(making, root)
        except OSError:
            if not os.path.isdir(root):  # another puller of the same image was faster
                raise
    finally:
        remove_tree(making)
    return root


class _Checked:
    """A blob's bytes, counted and digested on the way."""

    def __init__(self, blob: Blob, layer: Layer) -> None:
        self._blob = blob
        self._layer = layer
        self._hash = hashlib.new(layer.digest.partition(":")[0])
        self._size = 0

    def read(self, size: int) -> bytes:
        data = self._blob.read(size)
        self._size += len(data)
        if self._size > self._layer.size:
            raise PullError(f"layer {self._layer.digest} is longer than {self._layer.size} bytes")
        self._hash.update(data)
        return data

    def finish(self) -> None:
        """The rest is read, and the whole has the layer's size and digest."""
        while self.read(_PIECE_BYTES):
            pass
        if self._size != self._layer.size or self._hash.hexdigest() != self._layer.digest.partition(":")[2]:
            raise PullError(f"layer {self._layer.digest}: what was read has another digest")


def unpack(blob: Blob, layer: Layer, root: str) -> None:
    """The layer's files are in `root`, on top of its former files. The caller's root and working directory are as
    before. Raises PullError.
    """
    kind = layer.media_type
    checked = _Checked(blob, layer)
    if kind.endswith((".tar+gzip", ".tar.gzip")):
        stream: _Checked | GzipFile = GzipFile(fileobj=checked, mode="rb")  # type: ignore[call-overload]
    elif kind.endswith(".tar"):
        stream = checked
    else:
        raise PullError(f"layer {layer.digest}: {kind[:100]!r} cannot be unpacked, tar and tar with gzip can")
    outside = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    before = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chroot(root)
        os.chdir("/")
        try:
            _unpack_here(stream)
        finally:
            os.fchdir(outside)
            os.chroot(".")
            os.fchdir(before)
    finally:
        os.close(before)
        os.close(outside)
    checked.finish()


def _unpack_here(stream: _Checked | GzipFile) -> None:
    """The tar stream is unpacked below the current root."""
    made: set[str] = set()
    times: list[tuple[str, float]] = []
    try:
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as archive:  # type: ignore[call-overload]
            for member in archive:
                path = _path(member.name)
                folder, _, name = path.rpartition("/")
                if name == _OPAQUE:
                    _hide_all(folder or "/", made)
                elif name.startswith(_WHITEOUT):
                    _remove(f"{folder}/{name[len(_WHITEOUT) :]}")
                else:
                    _make(archive, member, path, times)
                    made.add(path)
    except (BadGzipFile, zlib.error) as error:
        raise PullError(f"a layer is not gzip: {error}") from error
    except (tarfile.TarError, EOFError) as error:
        raise PullError(f"a layer is not a tar archive: {error}") from error
    for path, time in reversed(times):
        os.utime(path, (time, time))


def _path(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise PullError(f"a layer has the name {name[:200]!r}")
    return "/" + "/".join(parts)


def _hide_all(folder: str, made: set[str]) -> None:
    """The folder's files of lower layers are gone; those of this layer stay."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = f"{folder.rstrip('/')}/{name}"
        if not any(own == path or own.startswith(f"{path}/") for own in made):
            _remove(path)


def _remove(path: str) -> None:
    if path in ("/", "/.", "/.."):
        raise PullError("a layer removes the root")
    remove_tree(path)


def _make(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, times: list[tuple[str, float]]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    is_there = os.path.lexists(path)
    if is_there and not (member.isdir() and stat.S_ISDIR(os.lstat(path).st_mode)):
        _remove(path)
        is_there = False
    if member.isdir():
        if not is_there:
            os.mkdir(path, 0o700)
        times.append((path, member.mtime))
    elif member.isreg():
        _make_file(archive, member, path)
    elif member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        os.link(_path(member.linkname), path, follow_symlinks=False)
        return  # owner, mode and time come with its other name
    elif member.ischr() or member.isblk() or member.isfifo():
        kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK if member.isblk() else stat.S_IFIFO
        os.mknod(path, kind | 0o600, os.makedev(member.devmajor, member.devminor))
    else:
        raise PullError(f"a layer has {path!r} of unknown type {member.type!r}")
    os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        os.chmod(path, member.mode & 0o7777)
        _set_attributes(member, path)
    if not member.isdir():
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)


def _make_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    content = archive.extractfile(member)
    assert content is not None, "a regular file has content"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", buffering=0) as file:
        while piece := content.read(_PIECE_BYTES):
            file.write(piece)


def _set_attributes(member: tarfile.TarInfo, path: str) -> None:
    """File capabilities and the like. One that the file system cannot store is lost, as with other unpackers."""
    for key, value in member.pax_headers.items():
        if key.startswith(_XATTR):
            try:
                os.setxattr(path, key[len(_XATTR) :], value.encode("utf-8", "surrogateescape"), follow_symlinks=False)
            except OSError:
                continue
