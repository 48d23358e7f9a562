"""`pyshim direct-volume add|remove|stats|resize`: volumes a CSI driver hands over as disks instead of mounting them.

The records and the words are those of `kata-runtime direct-volume`, so that either program serves either runtime.
"""

import argparse
import http.client
import json
import os
import shutil
import socket
from urllib.parse import quote

from pyshim.host.sources import DIRECT_VOLUMES, MOUNT_INFO, direct_volume, parse_mount_info, record_directory
from pyshim.host.whole_files import replace_file
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from pyshim.operator.state import STATE_DIR

_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", default=DIRECT_VOLUMES, metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--state-dir", default=STATE_DIR, metavar="DIR", help=argparse.SUPPRESS)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("add", "record a volume before its pod starts"),
        ("remove", "forget a volume"),
        ("stats", "print bytes and inodes as JSON"),
        ("resize", "grow the file system; grow the device first"),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument("--volume-path", required=True, metavar="PATH", help="what the pod names as its source")
        if name == "add":
            action.add_argument("--mount-info", required=True, metavar="JSON", help="volume-type, device, fstype, ...")
        if name == "resize":
            action.add_argument("--size", required=True, type=int, metavar="BYTES")


def run(arguments: argparse.Namespace) -> int:
    path, records = arguments.volume_path, arguments.records
    match arguments.action:
        case "add":
            add(path, arguments.mount_info, records=records)
        case "remove":
            shutil.rmtree(_record(path, records))
        case "stats":
            target = f"/direct-volume/stats?path={quote(path, safe='')}"
            print(ask(path, "GET", target, "", records=records, state_dir=arguments.state_dir))
        case "resize":
            body = json.dumps({"VolumePath": path, "Size": arguments.size})
            ask(path, "POST", "/direct-volume/resize", body, records=records, state_dir=arguments.state_dir)
    return 0


def add(path: str, mount_info: str, *, records: str = DIRECT_VOLUMES) -> None:
    """The volume's record is there, whole. Raises InvalidArgument for one nobody could use."""
    directory = record_directory(path, root=records)
    if directory is None or not path.startswith("/"):
        raise InvalidArgument(f"add direct volume {path!r}: not an absolute path, or too long for a record")
    volume = parse_mount_info(mount_info.encode(), path, directory)
    if not volume.device.startswith("/") or not volume.volume_type or not volume.fs_type:
        raise InvalidArgument(f"add direct volume {path!r}: volume-type, fstype or an absolute device is missing")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    replace_file(f"{directory}/{MOUNT_INFO}", mount_info.encode(), mode=0o600, durable=True, many_writers=True)


def ask(path: str, method: str, target: str, body: str, *, records: str, state_dir: str) -> str:
    """The answer of the sandbox that has the volume. Raises NotFound without one, FailedPrecondition as it says."""
    directory = _record(path, records)
    marks = [name for name in os.listdir(directory) if name != MOUNT_INFO and not name.startswith(".")]
    for sandbox_id in marks:
        address = f"{state_dir}/{sandbox_id}/shim-monitor.sock"
        if os.path.exists(address):
            return _exchange(address, method, target, body)
    raise NotFound(f"ask for direct volume {path!r}: no running sandbox has it")


def _record(path: str, records: str) -> str:
    volume = direct_volume(path, root=records)
    if volume is None:
        raise NotFound(f"find direct volume {path!r}: it was not added")
    return volume.record_dir


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, address: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._address)


def _exchange(address: str, method: str, target: str, body: str) -> str:
    connection = _UnixConnection(address)
    try:
        connection.request(method, target, body.encode())
        reply = connection.getresponse()
        text = reply.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"ask {address!r}: {error}") from error
    finally:
        connection.close()
    if reply.status != http.client.OK:
        raise FailedPrecondition(f"ask {address!r}: {text or reply.reason}")
    return text
