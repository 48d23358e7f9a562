"""`pyshim direct-volume add|remove|stats|resize`: volumes a CSI driver hands over as disks instead of mounting them.

Records and options are those of `kata-runtime direct-volume`, so that either program works with either runtime.
"""

import json
import os
import shutil
from urllib.parse import quote

import click
from msgspec import Struct

from pyshim.host.files import replace_file
from pyshim.model.errors import InvalidArgument, NotFound
from pyshim.model.places import DIRECT_VOLUMES
from pyshim.model.places import STATE_ROOT as STATE_DIR
from pyshim.node.cli.monitor import exchange, monitor_socket
from pyshim.node.cli.output import examples
from pyshim.resources.volumes.host.sources import MOUNT_INFO, direct_volume, parse_mount_info, record_directory


class Directories(Struct, frozen=True, kw_only=True):
    """The directories of volume records and sandbox states."""

    records: str
    state_dir: str


_volume_path = click.option(
    "--volume-path", "path", required=True, metavar="PATH", help="The path that the pod's volume has as its source."
)


@click.group(
    epilog=examples(
        """pyshim direct-volume add --volume-path /var/lib/vol1 --mount-info '{"volume-type": "block", ...}'""",
        "pyshim direct-volume stats --volume-path /var/lib/vol1",
    )
)
@click.option("--records", default=DIRECT_VOLUMES, hidden=True)
@click.option("--state-dir", default=STATE_DIR, hidden=True)
@click.pass_context
def command(context: click.Context, records: str, state_dir: str) -> None:
    """Record, measure and resize volumes handed over as disks."""
    context.obj = Directories(records=records, state_dir=state_dir)


@command.command("add")
@_volume_path
@click.option("--mount-info", required=True, metavar="JSON", help="volume-type, device, fstype, ...")
@click.pass_obj
def _add(at: Directories, path: str, mount_info: str) -> int:
    """Record a volume before its pod starts."""
    add(path, mount_info, records=at.records)
    return 0


@command.command("remove")
@_volume_path
@click.pass_obj
def _remove(at: Directories, path: str) -> int:
    """Forget a volume."""
    shutil.rmtree(_record(path, at.records))
    return 0


@command.command("stats")
@_volume_path
@click.option("--json", "_as_json", is_flag=True, help="As without it: JSON.")
@click.pass_obj
def _stats(at: Directories, path: str, _as_json: bool) -> int:
    """Print bytes and inodes as JSON."""
    target = f"/direct-volume/stats?path={quote(path, safe='')}"
    print(ask(path, "GET", target, "", records=at.records, state_dir=at.state_dir))
    return 0


@command.command("resize")
@_volume_path
@click.option("--size", required=True, type=int, metavar="BYTES")
@click.pass_obj
def _resize(at: Directories, path: str, size: int) -> int:
    """Grow the file system; grow the device first."""
    body = json.dumps({"VolumePath": path, "Size": size})
    ask(path, "POST", "/direct-volume/resize", body, records=at.records, state_dir=at.state_dir)
    return 0


def add(path: str, mount_info: str, *, records: str = DIRECT_VOLUMES) -> None:
    """The volume's record is written, whole. Raises InvalidArgument for a record that no pod could use."""
    directory = record_directory(path, root=records)
    if directory is None or not path.startswith("/"):
        raise InvalidArgument(f"add direct volume {path!r}: not an absolute path, or too long for a record")
    volume = parse_mount_info(mount_info.encode(), path, directory)
    if not volume.device.startswith("/") or not volume.volume_type or not volume.fs_type:
        raise InvalidArgument(f"add direct volume {path!r}: volume-type, fstype or an absolute device is missing")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    replace_file(f"{directory}/{MOUNT_INFO}", mount_info.encode(), mode=0o600, durable=True, many_writers=True)


def ask(path: str, method: str, target: str, body: str, *, records: str, state_dir: str) -> str:
    """The answer of the shim that has the volume. Raises NotFound without one, FailedPrecondition for a refusal."""
    directory = _record(path, records)
    marks = [name for name in os.listdir(directory) if name != MOUNT_INFO and not name.startswith(".")]
    for sandbox_id in marks:
        address = monitor_socket(state_dir, sandbox_id)
        if os.path.exists(address):
            return exchange(address, method, target, body.encode())
    raise NotFound(f"ask for direct volume {path!r}: no running sandbox has it")


def _record(path: str, records: str) -> str:
    volume = direct_volume(path, root=records)
    if volume is None:
        raise NotFound(f"find direct volume {path!r}: it was not added")
    return volume.record_dir
