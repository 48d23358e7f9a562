"""`python -m integration.remote`: the peer, and its other side by hand."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
from pathlib import Path

from pyshim.ttrpc import TtrpcError

from . import faults, peer
from .client import RemoteClient, agent_health
from .service import Service

DIRECTORY = Path("/run/peerpod")
_GUEST = Path(__file__).resolve().parents[2] / ".build" / "guest"
_ANNOTATION = "io.katacontainers.config.hypervisor."


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--directory", type=Path, default=DIRECTORY, help=f"everything of the peer ({DIRECTORY})")
    parser = argparse.ArgumentParser(
        prog="python -m integration.remote", description="a peer for the remote hypervisor"
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser("serve", parents=[common], help="serve until SIGTERM; VMs stay")
    serve.add_argument("--socket", type=Path, help="where shims connect (DIRECTORY/hypervisor.sock)")
    serve.add_argument("--pods-dir", type=Path, help="where the agents' sockets are (DIRECTORY/pods)")
    serve.add_argument("--guest", type=Path, default=_GUEST, help="the built guest (.build/guest)")
    serve.add_argument("--images", type=Path, help="a tar file with an OCI image layout, for guests that pull")
    serve.add_argument("--accelerator", choices=("tcg", "kvm"), default="tcg")
    serve.add_argument("--debug", action="store_true")
    create = verbs.add_parser("create", parents=[common], help="CreateVM; prints the agent's socket")
    create.add_argument("id")
    create.add_argument("--netns", default="/proc/self/ns/net")
    create.add_argument("--memory", default="512", help="MiB")
    create.add_argument("--vcpus", default="1")
    for verb, text in (("start", "StartVM"), ("stop", "StopVM"), ("check", "ask the agent for its health")):
        verbs.add_parser(verb, parents=[common], help=text).add_argument("id")
    verbs.add_parser("list", parents=[common], help="the peer's VMs, one JSON object a line")
    set_faults = verbs.add_parser(
        "fault",
        parents=[common],
        help="what fails from now on; without FAULT nothing does",
        description=faults.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    set_faults.add_argument("fault", nargs="*")
    return parser


async def _serve(options: argparse.Namespace) -> None:
    directory: Path = options.directory.resolve()
    settings = peer.Settings(
        directory=directory,
        pods=(options.pods_dir or directory / "pods").resolve(),
        guest=options.guest.resolve(),
        images=options.images.resolve() if options.images else None,
        accelerator=options.accelerator,
    )
    served = peer.Peer(settings)
    await served.open()
    service = asyncio.create_task(Service(served).serve(options.socket or directory / "hypervisor.sock"))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, service.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):  # by a signal
            await service
    finally:
        await served.close()


async def _ask(options: argparse.Namespace) -> None:
    directory: Path = options.directory
    client = RemoteClient(directory / "hypervisor.sock")
    match options.verb:
        case "create":
            annotations = {
                peer.NAME: options.id,
                peer.NAMESPACE: "default",
                f"{_ANNOTATION}default_vcpus": options.vcpus,
                f"{_ANNOTATION}default_memory": options.memory,
            }
            print(await client.create(options.id, annotations, options.netns))
        case "start":
            await client.start(options.id)
        case "stop":
            await client.stop(options.id)
        case "check":
            print(await agent_health(directory / "pods" / options.id / peer.SOCKET_NAME))
        case "list":
            for record in peer.saved(directory):
                print(json.dumps(record))
        case "fault":
            faults.Faults(directory / "faults").write(",".join(options.fault))


def main() -> int:
    options = _parser().parse_args()
    level = logging.DEBUG if getattr(options, "debug", False) else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("qemu").setLevel(logging.CRITICAL)
    try:
        asyncio.run(_serve(options) if options.verb == "serve" else _ask(options))
    except (OSError, RuntimeError, ValueError, TtrpcError) as error:
        print(f"{options.verb}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
