"""Images of many layers, and the files and mounts by which containerd's EROFS snapshotter gives them to a shim."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from protos.containerd import types_pb2

from . import images

SNAPSHOTTER = "erofs"
SEEN = (
    "cat /layer-marker; echo /layers/* /opaque/*; for program in /bin/busybox*; do $program echo $program; done;"
    " tail -n 1 /etc/passwd"
)
"""A script that shows what an image's layers made of each other."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


def image_layers(count: int) -> list[bytes]:
    """An image's layers, the bottom one first: each adds a file and overwrites one, most remove one of a layer below.

    The second hides a directory's old content, and brings a user; the top has a program of its own. 1 or more than 3.
    """
    layers = [images.base_layer()]
    for number in range(1, count):
        files = {f"layers/{number}": b"", "layer-marker": f"{number}\n".encode()}
        if number == 1:
            files |= {"opaque/old": b"", "etc/passwd": b"root:x:0:0::/:/bin/sh\nbob:x:1234:50::/:/bin/sh\n"}
        if number == 2:
            files |= {f"opaque/{_OPAQUE}": b"", "opaque/new": b""}
        if number > 2:
            files |= {f"layers/{_WHITEOUT}{number - 2}": b""}
        if number == count - 1:
            files |= {"bin/busybox-of-the-top": images.BUSYBOX.read_bytes()}
        layers.append(images.layer(files, mode=0o755))
    return layers


def seen(count: int) -> list[str]:
    """The lines of `SEEN` in a container of `image_layers(count)`."""
    if count == 1:
        return ["lower", "/layers/* /opaque/*", "/bin/busybox", "alice:x:1000:1000:Alice:/home:/bin/sh"]
    last = count - 1
    files = f"/layers/{last - 1} /layers/{last} /opaque/new"
    return [str(last), files, "/bin/busybox", "/bin/busybox-of-the-top", "bob:x:1234:50::/:/bin/sh"]


def layer_files(directory: Path, layers: Sequence[bytes]) -> list[Path]:
    """The EROFS file of each of these layers, below `directory` as the snapshotter has them; in the same order."""
    made = []
    for number, data in enumerate(layers, 1):
        snapshot, content = directory / str(number), directory / f"{number}-content"
        snapshot.mkdir(mode=0o700, parents=True)
        content.mkdir()
        _unpack(data, content)
        made.append(snapshot / "layer.erofs")
        command: list[str | Path] = ["mkfs.erofs", "--quiet", "-Enoinline_data", made[-1], content]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return made


def _unpack(layer: bytes, directory: Path) -> None:
    """The layer's files, and in place of what it removes the marks by which an overlay knows it."""
    images.unpack(layer, directory)
    for mark in directory.rglob(f"{_WHITEOUT}*"):
        mark.unlink()
        if mark.name == _OPAQUE:
            os.setxattr(mark.parent, "trusted.overlay.opaque", b"y")
        else:
            os.mknod(mark.with_name(mark.name.removeprefix(_WHITEOUT)), stat.S_IFCHR, os.makedev(0, 0))


def layer_mount(path: Path) -> types_pb2.Mount:
    return types_pb2.Mount(type="erofs", source=str(path), options=["ro", "loop"])


def overlay_mount(*options: str) -> types_pb2.Mount:
    return types_pb2.Mount(type="format/mkdir/overlay", source="overlay", options=options)


def active_mounts(layers: Sequence[Path], snapshot: Path) -> list[types_pb2.Mount]:
    """A container's root of these layers, the bottom one first, as containerd 2.2 and 2.3 give it.

    Its upper directory is in `snapshot`, which a VM cannot use.
    """
    host = [f"workdir={snapshot}/work", f"upperdir={snapshot}/fs"]
    return [*_lower_mounts(layers), overlay_mount(*host, f"lowerdir={_named(0, len(layers))}")]


def view_mounts(layers: Sequence[Path]) -> list[types_pb2.Mount]:
    """The same without an upper directory, of several layers."""
    return [*_lower_mounts(layers), overlay_mount(f"lowerdir={_named(0, len(layers))}")]


def block_mounts(layers: Sequence[Path], upper: Path) -> list[types_pb2.Mount]:
    """The same with the ext4 `upper` for what is written, as with the snapshotter's `default_size`."""
    made = [f"X-containerd.mkdir.path={{{{ mount 0 }}}}/{name}:0755" for name in ("upper", "work")]
    within = ["workdir={{ mount 0 }}/work", "upperdir={{ mount 0 }}/upper"]
    return [
        types_pb2.Mount(type="ext4", source=str(upper), options=["rw", "loop"]),
        *_lower_mounts(layers),
        overlay_mount(*made, *within, f"lowerdir={_named(1, len(layers))}"),
    ]


def _lower_mounts(layers: Sequence[Path]) -> list[types_pb2.Mount]:
    return [layer_mount(layer) for layer in reversed(layers)]


def _named(first: int, count: int) -> str:
    return f"{{{{ mount {first} }}}}" if count == 1 else f"{{{{ overlay {first} {first + count - 1} }}}}"
