"""The guest agent: a ttrpc server that implements kata-agent's API and runs containers with `crun`.

It runs as PID 1, or as a child of a small init, in a guest that often has no hardware virtualization: Python code there
costs about ten times what it costs on the host. So import cost is a feature. Modules reached before the first
Health.Check import only built-in C modules, `os` and `pyshim.ttrpc`; everything else is imported when a call first
needs it, or while the agent waits (`main._PRELOAD`). No asyncio, logging, dataclasses, typing, re, json, enum, socket
or subprocess anywhere.

Start it as `python3 -I -S <dir>/guest/agent/__main__.py [agent.key=value ...]`; `<dir>` also holds `pyshim/__init__.py`
and `pyshim/ttrpc/`. Arguments override `/proc/cmdline`. What it needs from the image:

- Python 3.11+: os, time, select, fcntl, termios, errno, stat, posixpath, heapq, struct, ctypes (with libffi), and the C
  modules `_socket`, `_signal`, `_json`, `_struct`, `_ctypes`.
- binaries: crun; modprobe (kernel modules); mkfs.ext4 and resize2fs (block volumes); iptables-save and
  iptables-restore; /bin/sh (debug console). All but crun are needed only by the calls that use them, and the error
  names the one that is missing.
- mounted: /proc, /sys, devtmpfs on /dev, devpts on /dev/pts, cgroup2 on /sys/fs/cgroup, writable /run and /tmp.
- devices: the virtio-serial port or vsock it listens on; /dev/null, /dev/random.

Rooms, and which way imports go (left may import right): calls -> container, storage, net -> runtime, wire -> errors,
log. Read `service.py` first: the table from wire method to function. `runtime/loop.py` is how `async def` runs here
without asyncio.
"""
