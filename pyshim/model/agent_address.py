"""Where the guest's agent answers: an address, not an assumption (one ttrpc byte stream at each).

Forms: `vsock://cid:port`, `hvsock://path:port` (unix socket with the CONNECT line), `serial://path` (unix socket of one
virtio-serial port), `unix://path`.
"""

from pyshim.model.dataclasses import dataclass

AGENT_VSOCK_PORT = 1024


@dataclass(frozen=True, slots=True)
class VsockAddress:
    cid: int
    port: int

    def __str__(self) -> str:
        return f"vsock://{self.cid}:{self.port}"


@dataclass(frozen=True, slots=True)
class HvsockAddress:
    path: str
    port: int

    def __str__(self) -> str:
        return f"hvsock://{self.path}:{self.port}"


@dataclass(frozen=True, slots=True)
class SerialAddress:
    path: str

    def __str__(self) -> str:
        return f"serial://{self.path}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"


AgentAddress = VsockAddress | HvsockAddress | SerialAddress | UnixAddress
