"""A program of the tests: takes the place of `serve`, and reports its arguments to each client of fd 3.

It notes its pid in the directory FAKE_DAEMON_PIDS, so that a test can count daemons and end them, and gives up by
itself after a minute without a client.
"""

import gc
import json
import os
import random
import socket
import sys
from contextlib import suppress
from pathlib import Path

with open(os.path.join(os.environ["FAKE_DAEMON_PIDS"], str(os.getpid())), "w"):
    pass
listener = socket.socket(fileno=3)
listener.settimeout(60)
status = Path("/proc/self/status").read_text().splitlines()
heap = Path("/proc/self/smaps").read_text().partition("[heap]")[2].partition("VmFlags:")[2].splitlines()[0]
command = Path("/proc/self/cmdline").read_bytes().decode().split("\0")[:-1]
reason = ""
if "-executed-because" in command:  # an executed daemon gets this flag, a forked one does not
    at = command.index("-executed-because")
    reason = command[at + 1]
    del command[at : at + 2]
report = json.dumps(
    {
        "argv": command[4:],  # after the interpreter, its two flags and the launcher
        "reason": reason,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "command": command,
        # Without 32 and 33, which are glibc's own: no program can set them, and they are as the test runner has them.
        "signals": {
            line[:6]: hex(int(line[8:], 16) & ~(3 << 31)) for line in status if line[:4] in ("SigB", "SigI", "SigC")
        },
        "limits": Path("/proc/self/limits").read_text(),
        "cgroups": Path("/proc/self/cgroup").read_text(),
        "umask": next(line for line in status if line[:5] == "Umask"),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "random": random.random(),
        "frozen": gc.get_freeze_count() > 1000,  # Python 3.12 freezes some 375 objects when it starts
        "heap": [flag for flag in heap.split() if flag == "mg"],
        "collects": gc.isenabled(),
        "session": os.getsid(0),
        "cwd": os.getcwd(),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "fds": {
            fd: os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        },
        "log_blocks": os.get_blocking(2),
        "no_site": bool(sys.flags.no_site and sys.flags.isolated),
        "environment": dict(os.environ),
        "prepared": len(globals().get("prepared", ())),
    }
)
os.write(2, b"daemon speaks\n")
while True:
    connection, _ = listener.accept()
    # A caller that only looked for a listener has gone again.
    with suppress(BrokenPipeError):
        connection.sendall(report.encode())
    connection.close()
