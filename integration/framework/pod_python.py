"""A container that can run Python, the host's own: for what busybox has no tool, such as UDP or large datagrams.

The image stays busybox; the host's /usr comes as a read-only volume, over the pod's share.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from protos.cri import v1_pb2 as pb

from . import kata_agent
from .cri import Container, Pod, Security

_PYTHON = os.path.realpath(sys.executable)
_TREES = tuple(dict.fromkeys(("/usr", *((sys.base_prefix,) if not sys.base_prefix.startswith("/usr") else ()))))
LINKS = "ln -sfn usr/lib /lib; ln -sfn usr/lib64 /lib64; "
"""For a container that has the host's /usr: its programs find their libraries."""

ECHO = (
    f"""
# With kata-agent an IPv6 address can be bound only after the kernel's detection of duplicates.
TENTATIVE = {kata_agent.is_chosen()}
"""
    + """
import os, socket, sys, threading, time
def tcp(address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        try:
            listener = socket.create_server((address, port), family=family, backlog=64)
            break
        except OSError as error:
            if not TENTATIVE or error.errno != 99:
                raise
            time.sleep(0.1)
    threading.Thread(target=accept, args=(listener,)).start()
def accept(listener):
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],)).start()
def answer(connection):
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
        connection.sendall(b"<end>")
def udp(family, port):
    with socket.socket(family, socket.SOCK_DGRAM) as server:
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.bind(("", port))
        while True:
            data, sender = server.recvfrom(65536)
            server.sendto(data, sender)
for place in sys.argv[1:]:
    address, _, port = place.rpartition(":")
    if address:
        tcp(address, int(port))
    else:
        for family in (socket.AF_INET, socket.AF_INET6):
            threading.Thread(target=udp, args=(family, int(port))).start()
print("ready", flush=True)
"""
)
"""Echoes on each place given: `ADDRESS:PORT` for TCP, `:PORT` for UDP. A TCP answer ends with `<end>`."""


def start_python(
    pod: Pod, script: str, *arguments: str, mounts: Sequence[pb.Mount] = (), security: Security | None = None
) -> Container:
    """A container of `pod` that runs `script`."""
    trees = [pb.Mount(container_path=tree, host_path=tree, readonly=True) for tree in _TREES]
    command = ("sh", "-c", LINKS + 'exec "$@"', "sh", *_argv(script, *arguments))
    return pod.start(*command, mounts=[*trees, *mounts], security=security)


def run_python(container: Container, script: str, *arguments: str) -> str:
    """What `script` printed, run to its successful end in a container that `start_python` made."""
    # Its first process may still be making the links.
    linked = ("sh", "-c", 'until [ -e /lib64 ]; do sleep 0.1; done; exec "$@"', "sh")
    done = container.exec(*linked, *_argv(script, *arguments), timeout=60)
    assert done.code == 0, done
    return done.out


def _argv(script: str, *arguments: str) -> tuple[str, ...]:
    return (_PYTHON, "-I", "-S", "-c", script, *arguments)
