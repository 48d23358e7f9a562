"""Real network namespaces of a test's own, and a guest's network stack played on a tap's descriptors."""

import json
import os
import select
import signal
import struct
import subprocess
import threading
import time
from typing import Any

VNET_HEADER_BYTES = 10
_ARP, _IPV4 = 0x0806, 0x0800


class Namespace:
    """A network namespace that exists as long as a sleeping process in it; nothing of it is mounted or named."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self.pid = self._holder.pid
        self.path = f"/proc/{self.pid}/ns/net"
        self.run("ip", "link", "set", "lo", "up")
        self.run("sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0", "net.ipv6.conf.all.accept_dad=0")

    def run(self, *argv: str) -> str:
        done = subprocess.run(["nsenter", f"--net={self.path}", *argv], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}"
        return done.stdout

    def json(self, *argv: str) -> Any:
        return json.loads(self.run(*argv) or "[]")

    def state(self) -> dict[str, Any]:
        """All that a network plugin could have set, as data to compare."""
        self._settle()
        links = self.json("ip", "-d", "-j", "link")
        for link in links:
            details = link.get("linkinfo", {})
            for key in ("info_data", "info_slave_data"):
                # A bridge's running timers and how many stations it has seen are no settings.
                found = details.get(key, {}).items()
                details[key] = {name: value for name, value in found if "timer" not in name and "learned" not in name}
        return {
            "links": links,
            "addresses": [
                [(item["local"], item["prefixlen"]) for item in link["addr_info"]]
                for link in self.json("ip", "-j", "address")
            ],
            "routes": [self.json("ip", "-j", version, "route", "show", "table", "all") for version in ("-4", "-6")],
            "neighbours": self.json("ip", "-j", "neigh", "show", "nud", "permanent"),
            "qdiscs": self.json("tc", "-j", "qdisc", "show"),
            "filters": [self.json("tc", "-j", "filter", "show", "dev", link["ifname"], "ingress") for link in links],
        }

    def _settle(self) -> None:
        """The kernel has finished what follows from a link going up: its carrier, then its own addresses and routes."""
        deadline = time.monotonic() + 20
        while any("UP" in link["flags"] and not _is_ready(link) for link in self.json("ip", "-j", "address")):
            assert time.monotonic() < deadline, self.run("ip", "address")
            time.sleep(0.02)

    def close(self) -> None:
        if self._holder.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


def _is_ready(link: dict[str, Any]) -> bool:
    return link["operstate"] in ("UP", "UNKNOWN") and not any(item.get("tentative") for item in link["addr_info"])


class EchoHost:
    """Answers ARP and ICMP echo for one IPv4 address, a frame at a time."""

    def __init__(self, mac: str, address: str) -> None:
        self.echoes = 0
        self.largest_bytes = 0
        self.strangers: list[bytes] = []
        self._mac = bytes.fromhex(mac.replace(":", ""))
        self._address = bytes(int(part) for part in address.split("."))

    def reply(self, frame: bytes) -> bytes:
        """The answer to a frame; empty for none."""
        self.largest_bytes = max(self.largest_bytes, len(frame))
        source, (kind,) = frame[6:12], struct.unpack_from("!H", frame, 12)
        head, body = source + self._mac + frame[12:14], frame[14:]
        if kind == _ARP and body[6:8] == b"\x00\x01" and body[24:28] == self._address:
            return head + body[:6] + b"\x00\x02" + self._mac + self._address + body[8:18]
        if kind == _IPV4 and body[9] == 1 and body[16:20] == self._address and body[20] == 8:
            self.echoes += 1
            icmp = b"\x00\x00\x00\x00" + body[24 : struct.unpack_from("!H", body, 2)[0]]
            icmp = icmp[:2] + struct.pack("!H", _checksum(icmp)) + icmp[4:]
            # Swapped addresses leave the sum of the header as it was.
            return head + body[:12] + body[16:20] + body[12:16] + icmp
        self.strangers.append(frame)
        return b""


class GuestStack(EchoHost):
    """The same on the queues of a tap, as a VM behind them would."""

    def __init__(self, fds: tuple[int, ...], mac: str, address: str) -> None:
        super().__init__(mac, address)
        self._fds = fds
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="guest stack")

    def __enter__(self) -> "GuestStack":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([*self._fds, self._stop_read], [], [])
            if self._stop_read in ready:
                return
            for fd in ready:
                data = os.read(fd, 70000)
                reply = self.reply(data[VNET_HEADER_BYTES:])
                if reply:
                    os.write(fd, bytes(VNET_HEADER_BYTES) + reply)


def _checksum(data: bytes) -> int:
    if len(data) % 2:
        data += b"\x00"
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
