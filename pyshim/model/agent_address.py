"""Where the guest's agent answers: an address, not an assumption (one ttrpc byte stream at each).

Forms: `vsock://cid:port`, `hvsock://path:port` (unix socket with the CONNECT line), `serial://path` (unix socket of one
virtio-serial port), `unix://path`.
"""

from dataclasses import dataclass

from pyshim.model.errors import InvalidArgument

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


def parse_agent_address(text: str) -> AgentAddress:
    """The address `text` spells; `str()` of it gives `text` back. Raises InvalidArgument naming the text."""
    scheme, separator, rest = text.partition("://")
    match scheme:
        case "unix" if separator and rest:
            return UnixAddress(rest)
        case "serial" if separator and rest:
            return SerialAddress(rest)
        case "hvsock" | "vsock" if separator:
            left, _, port_text = rest.rpartition(":")
            if left and port_text.isascii() and port_text.isdigit() and int(port_text) < 2**32:
                if scheme == "hvsock":
                    return HvsockAddress(left, int(port_text))
                if left.isascii() and left.isdigit() and int(left) < 2**32:
                    return VsockAddress(int(left), int(port_text))
    raise InvalidArgument(
        f"parse agent address {text!r}: expected vsock://cid:port, hvsock://path:port, serial://path or unix://path"
    )
