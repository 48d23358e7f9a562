"""The daemon that serves a shared directory, decided: what `host/virtiofsd.py` carries out."""

from pyshim.model.dataclasses import dataclass
from pyshim.model.ids import HostPath


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtiofsdPlan:
    """One virtiofsd: `listen_path` is bound by us and handed over as a listening fd; flags follow the flavour found."""

    binary: HostPath
    shared_dir: HostPath
    listen_path: HostPath
    cache: str
    extra_args: tuple[str, ...]
    debug: bool
