"""Every TCP connection to a namespace's loopback addresses, whatever its port, taken by one listening socket.

Kubernetes' port-forward dials `localhost:<port>` in the pod's network namespace, and which port nobody knows before. A
BPF program of the kind SK_LOOKUP, attached to that namespace, is asked by the kernel for the socket of each new
connection and names ours. No address, route or packet rule changes: nothing of it can be seen in the namespace, and it
is gone with its descriptor, however the shim ends. Needs Linux 5.9 with CONFIG_BPF_SYSCALL.
Source: the kernel's Documentation/bpf/prog_sk_lookup.rst; linux/bpf.h for numbers and layouts.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
from typing import NamedTuple

_SYS_BPF = 321
"""Of x86-64, the one architecture the rest of port-forward (`plan/relay_program.py`) is made for."""
_MAP_CREATE, _MAP_UPDATE_ELEM, _PROG_LOAD, _LINK_CREATE = 0, 2, 5, 28
_MAP_TYPE_SOCKMAP, _PROG_TYPE_SK_LOOKUP, _ATTACH_SK_LOOKUP = 15, 30, 36
_MAP_LOOKUP_ELEM, _SK_RELEASE, _SK_ASSIGN = 1, 86, 124
_PSEUDO_MAP_FD = 1
_PASS = 1
# Fields of struct bpf_sk_lookup.
_FAMILY, _PROTOCOL, _LOCAL_IP4, _LOCAL_IP6 = 8, 12, 40, 44
_BACKLOG = 64

# Opcodes: class, source and operation of linux/bpf_common.h and linux/bpf.h.
_COPY, _LOAD32, _STORE32, _AND, _ADD, _SET, _CALL, _EXIT = 0xBF, 0x61, 0x62, 0x57, 0x07, 0xB7, 0x85, 0x95
_JUMP, _JUMP_EQUAL, _JUMP_OTHER, _SET64 = 0x05, 0x15, 0x55, 0x18
_R0, _R1, _R2, _R3, _R6, _R7, _FRAME = 0, 1, 2, 3, 6, 7, 10


class _Step(NamedTuple):
    """One instruction; `to` is the label a jump goes to, `label` the name of this place."""

    code: int
    target: int = 0
    source: int = 0
    offset: int = 0
    value: int = 0
    to: str = ""
    label: str = ""


def steer_loopback() -> tuple[int, int]:
    """A listening TCP socket and the link that steers connections to it, in the calling thread's network namespace.

    An accepted connection's own address is the one that was dialled, its port included. Both descriptors are the
    caller's; steering ends when the second is closed. Raises OSError where the kernel has no such programs.
    """
    listener = _listen()
    try:
        link = _attach(listener.fileno())
    except BaseException:
        listener.close()
        raise
    return listener.detach(), link


def _listen() -> socket.socket:
    """On an IPv6 socket that takes IPv4 as well; on IPv4 alone where the kernel has nothing else."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # The wildcard is the one address both families share. The port it takes is any free one, and nobody gets
            # to it: from outside, frames go past this namespace's stack to the VM.
            listener.bind(("::", 0))
        else:
            listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _attach(listener_fd: int) -> int:
    opened: list[int] = []
    try:
        sockets = _bpf(_MAP_CREATE, struct.pack("=IIII48x", _MAP_TYPE_SOCKMAP, 4, 8, 1))
        opened.append(sockets)
        key, value = ctypes.c_uint32(0), ctypes.c_uint64(listener_fd)
        where = (ctypes.addressof(key), ctypes.addressof(value))
        _bpf(_MAP_UPDATE_ELEM, struct.pack("=I4xQQQ", sockets, *where, 0))
        program = _load(_program(sockets))
        opened.append(program)
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        opened.append(namespace)
        # The link keeps the program, the program the map.
        return _bpf(_LINK_CREATE, struct.pack("=IIII16x", program, namespace, _ATTACH_SK_LOOKUP, 0))
    finally:
        for fd in opened:
            os.close(fd)


def _load(program: bytes) -> int:
    code = ctypes.create_string_buffer(program, len(program))
    license_text = ctypes.create_string_buffer(b"Apache-2.0")
    attributes = struct.pack(
        "=IIQQ24x16sII24x",
        _PROG_TYPE_SK_LOOKUP,
        len(program) // 8,
        ctypes.addressof(code),
        ctypes.addressof(license_text),
        b"pyshim_loopback",
        0,
        _ATTACH_SK_LOOKUP,
    )
    return _bpf(_PROG_LOAD, attributes)


def _program(sockets_fd: int) -> bytes:
    """TCP to 127.0.0.0/8 or ::1 goes to the socket at index 0 of the map; everything else as if nobody had asked."""
    last_word_of_one = socket.htonl(1)
    return _assembled(
        _Step(_COPY, _R6, _R1),
        _Step(_LOAD32, _R2, _R6, _PROTOCOL),
        _Step(_JUMP_OTHER, _R2, value=socket.IPPROTO_TCP, to="pass"),
        _Step(_LOAD32, _R2, _R6, _FAMILY),
        _Step(_JUMP_EQUAL, _R2, value=socket.AF_INET6, to="ipv6"),
        _Step(_LOAD32, _R2, _R6, _LOCAL_IP4),
        _Step(_AND, _R2, value=socket.htonl(0xFF000000)),
        _Step(_JUMP_OTHER, _R2, value=socket.htonl(127 << 24), to="pass"),
        _Step(_JUMP, to="assign"),
        _Step(_LOAD32, _R2, _R6, _LOCAL_IP6, label="ipv6"),
        _Step(_JUMP_OTHER, _R2, to="pass"),
        _Step(_LOAD32, _R2, _R6, _LOCAL_IP6 + 4),
        _Step(_JUMP_OTHER, _R2, to="pass"),
        _Step(_LOAD32, _R2, _R6, _LOCAL_IP6 + 8),
        _Step(_JUMP_OTHER, _R2, to="pass"),
        _Step(_LOAD32, _R2, _R6, _LOCAL_IP6 + 12),
        _Step(_JUMP_OTHER, _R2, value=last_word_of_one, to="pass"),
        _Step(_STORE32, _FRAME, offset=-4, label="assign"),
        _Step(_SET64, _R1, _PSEUDO_MAP_FD, value=sockets_fd),
        _Step(0),
        _Step(_COPY, _R2, _FRAME),
        _Step(_ADD, _R2, value=-4),
        _Step(_CALL, value=_MAP_LOOKUP_ELEM),
        _Step(_JUMP_EQUAL, _R0, to="pass"),
        _Step(_COPY, _R7, _R0),
        _Step(_COPY, _R1, _R6),
        _Step(_COPY, _R2, _R7),
        _Step(_SET, _R3),
        _Step(_CALL, value=_SK_ASSIGN),
        _Step(_COPY, _R1, _R7),
        _Step(_CALL, value=_SK_RELEASE),
        _Step(_SET, _R0, value=_PASS, label="pass"),
        _Step(_EXIT),
    )


def _assembled(*steps: _Step) -> bytes:
    places = {step.label: number for number, step in enumerate(steps) if step.label}
    code = b""
    for number, step in enumerate(steps):
        offset = places[step.to] - number - 1 if step.to else step.offset
        code += struct.pack("=BBhi", step.code, step.source << 4 | step.target, offset, step.value)
    return code


def _bpf(command: int, attributes: bytes) -> int:
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result: int = libc.syscall(ctypes.c_long(_SYS_BPF), command, buffer, len(attributes))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
