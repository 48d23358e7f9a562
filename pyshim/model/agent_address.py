"""The address of the guest's agent; each leads to one ttrpc byte stream.

- `vsock://cid:port`
- `hvsock://path:port`: a unix socket that expects the line `CONNECT port` first
- `serial://path`: the unix socket of a virtio-serial port
- `unix://path`
"""

import msgspec

AGENT_VSOCK_PORT = 1024


class VsockAddress(msgspec.Struct, frozen=True):
    cid: int
    port: int

    def __str__(self) -> str:
        return f"vsock://{self.cid}:{self.port}"


class HvsockAddress(msgspec.Struct, frozen=True):
    path: str
    port: int

    def __str__(self) -> str:
        return f"hvsock://{self.path}:{self.port}"


class SerialAddress(msgspec.Struct, frozen=True):
    path: str

    def __str__(self) -> str:
        return f"serial://{self.path}"


class UnixAddress(msgspec.Struct, frozen=True):
    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"


AgentAddress = VsockAddress | HvsockAddress | SerialAddress | UnixAddress
