"""The guest agent: a ttrpc server that implements kata-agent's API and runs containers with `crun`.

It is process 1 of the guest, or a child of a small init. Start it as `python3 -I -m guest.agent [agent.key=value ...]`;
arguments override words of `/proc/cmdline`. It needs from the image:

- Python 3.11 or newer with ctypes, the protobuf package, this repository's `protos`, `pyshim.ttrpc` and `pyshim.cdi`.
- binaries: crun; modprobe (kernel modules); mkfs.ext4 and resize2fs (block volumes); iptables-save and
  iptables-restore; /bin/sh (debug console). Except for crun, a missing one fails only the calls that use it, and the
  error names it.
- mounted: /proc, /sys, devtmpfs on /dev, devpts on /dev/pts, cgroup2 on /sys/fs/cgroup, writable /run and /tmp.
- devices: the virtio-serial port or vsock it listens on; /dev/null, /dev/random.

Read `__main__.py` first, which makes all objects, then `service.py`, the table from method to function. Imports run one
way: `calls` -> `container` -> `storage` -> `pull` -> the modules beside this one.
"""
