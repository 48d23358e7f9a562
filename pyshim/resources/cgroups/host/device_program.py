"""The device list of a cgroup v2: a small BPF program that the kernel runs at each open and mknod of a device.

Rules have the form of v1's `devices.allow`, `c 1:3 rwm`. Sources: the kernel's uapi/linux/bpf.h, there
`bpf_cgroup_dev_ctx`, and Documentation/bpf/standardization/instruction-set.rst. runc and crun make such programs.
"""

import ctypes
import os
import struct
import threading
from collections.abc import Iterable

from pyshim.host import syscalls

_TYPES = {"b": 1, "c": 2}
_ACCESS = {"m": 1, "r": 2, "w": 4}
_ALL_ACCESS = sum(_ACCESS.values())

_RESULT, _CONTEXT, _TYPE, _WANTED, _MAJOR, _MINOR = range(6)
"""Registers. _CONTEXT has the call's argument, and is free once that was read."""
_LOAD_WORD, _AND, _SHIFT_RIGHT, _COPY, _SET, _UNLESS, _RETURN = 0x61, 0x54, 0x74, 0xBC, 0xB7, 0x55, 0x95
_ALLOW = ((_SET, _RESULT, 0, 0, 1), (_RETURN, 0, 0, 0, 0))
_DENY = ((_SET, _RESULT, 0, 0, 0), (_RETURN, 0, 0, 0, 0))
_READ_REQUEST = (
    (_LOAD_WORD, _TYPE, _CONTEXT, 0, 0),
    (_AND, _TYPE, 0, 0, 0xFFFF),
    (_LOAD_WORD, _WANTED, _CONTEXT, 0, 0),
    (_SHIFT_RIGHT, _WANTED, 0, 0, 16),
    (_LOAD_WORD, _MAJOR, _CONTEXT, 4, 0),
    (_LOAD_WORD, _MINOR, _CONTEXT, 8, 0),
)
Instruction = tuple[int, int, int, int, int]
"""Operation, destination register, source register, offset, number."""

_PROG_LOAD, _PROG_ATTACH = 5, 8
_CGROUP_DEVICE_PROGRAM, _AT_CGROUP_DEVICE = 15, 6
_ALLOW_MULTI, _REPLACE = 2, 4
_LICENCE = b"Apache\0"


def program(rules: Iterable[str]) -> bytes:
    """The program that allows what a rule allows, and denies all else."""
    instructions: list[Instruction] = [*_READ_REQUEST]
    for rule in rules:
        instructions += _allowed(rule)
    instructions += _DENY
    return b"".join(
        struct.pack("<BBhi", operation, register | source << 4, offset, number)
        for operation, register, source, offset, number in instructions
    )


def _allowed(rule: str) -> tuple[Instruction, ...]:
    """Instructions that allow a request of the rule and continue with the next rule for others."""
    kind, device, access = rule.split()
    major, _, minor = device.partition(":")
    forbidden = _ALL_ACCESS & ~sum(_ACCESS[letter] for letter in access)
    checks: list[Instruction] = [(_UNLESS, _TYPE, 0, 0, _TYPES[kind])]
    if forbidden:
        checks += [
            (_COPY, _CONTEXT, _WANTED, 0, 0),
            (_AND, _CONTEXT, 0, 0, forbidden),
            (_UNLESS, _CONTEXT, 0, 0, 0),
        ]
    checks += [
        (_UNLESS, register, 0, 0, int(number))
        for register, number in ((_MAJOR, major), (_MINOR, minor))
        if number != "*"
    ]
    length = len(checks) + len(_ALLOW)
    return (
        *(
            (operation, register, source, length - index - 1 if operation == _UNLESS else offset, number)
            for index, (operation, register, source, offset, number) in enumerate(checks)
        ),
        *_ALLOW,
    )


class DeviceList:
    """The devices that processes of one cgroup may open; called from threads. It ends with the cgroup."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._rules: dict[str, None] = {}
        self._program_fd = -1
        self._lock = threading.Lock()

    def allow(self, *rules: str) -> None:
        """Allows these devices in addition to those of former calls; all others are denied. Raises OSError."""
        with self._lock:
            wanted = {**self._rules, **dict.fromkeys(rules)}
            if self._program_fd < 0 or wanted != self._rules:
                self._replace(program(wanted))
            self._rules = wanted

    def _replace(self, code: bytes) -> None:
        new_fd = _load(code)
        try:
            cgroup_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                flags = _ALLOW_MULTI | (_REPLACE if self._program_fd >= 0 else 0)
                words = (cgroup_fd, new_fd, _AT_CGROUP_DEVICE, flags, max(self._program_fd, 0))
                syscalls.bpf(_PROG_ATTACH, struct.pack("=5I", *words))
            finally:
                os.close(cgroup_fd)
        except BaseException:
            os.close(new_fd)
            raise
        self.close()
        self._program_fd = new_fd

    def close(self) -> None:
        """The list stays in force and cannot be changed any more. Idempotent."""
        if self._program_fd >= 0:
            os.close(self._program_fd)
            self._program_fd = -1


def _load(code: bytes) -> int:
    """The program's close-on-exec descriptor."""
    instructions = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(_LICENCE)
    request = struct.pack(
        "=IIQQ",
        _CGROUP_DEVICE_PROGRAM,
        len(code) // 8,
        ctypes.addressof(instructions),
        ctypes.addressof(licence),
    )
    return syscalls.bpf(_PROG_LOAD, request)
