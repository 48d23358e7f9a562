"""Random UUIDs of the kernel's making: the module `uuid` takes a fiftieth of a shim's start."""

_PATH = "/proc/sys/kernel/random/uuid"


def new_uuid() -> str:
    """One that nobody else has. Source: random(4), /proc interfaces."""
    with open(_PATH) as file:
        return file.read().strip()
