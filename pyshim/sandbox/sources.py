"""Asks the host about everything a spec names as a volume, before anything is planned."""

from collections.abc import Mapping

from pyshim.model.oci import OciSpec
from pyshim.model.volumes import SourceFacts
from pyshim.plan.volumes import volume_sources
from pyshim.sandbox.seams import Host


async def volume_facts(host: Host, spec: OciSpec) -> Mapping[str, SourceFacts]:
    """The facts of every path in `volume_sources(spec)`. Raises ShimError for a direct volume with a broken record."""
    return {source: await host.source_facts(source) for source in volume_sources(spec)}
