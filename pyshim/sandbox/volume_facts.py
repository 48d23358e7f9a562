"""Asks the host about everything a spec names as a volume, before anything is planned."""

from collections.abc import Mapping

from pyshim.model.config import Config
from pyshim.model.oci import OciSpec
from pyshim.model.volumes import SourceFacts
from pyshim.plan.volumes import volume_sources
from pyshim.sandbox.seams import Host


async def volume_facts(host: Host, spec: OciSpec, config: Config) -> Mapping[str, SourceFacts]:
    """The facts of every path in `volume_sources(spec)`.

    Raises ShimError for a direct volume with a broken record and a vhost-user disk that nobody serves.
    """
    store = config.hypervisor.vhost_user_store_path if config.hypervisor.enable_vhost_user_store else ""
    return {source: await host.source_facts(source, store) for source in volume_sources(spec)}
