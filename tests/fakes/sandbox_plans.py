"""Plans of a sandbox on a host with room for any VM."""

from typing import Any

from pyshim.model.config import Config
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import SandboxId
from pyshim.model.oci import ContainerKind, OciSpec
from pyshim.model.plans import SandboxPlan
from pyshim.pod.plan.sandbox import sandbox_plan
from tests.fakes.facts import PLENTY


def planned(
    config: Config,
    host: HostFacts,
    spec: OciSpec,
    *,
    sandbox_id: str = "s1",
    kind: ContainerKind = ContainerKind.SINGLE_CONTAINER,
    **more: Any,
) -> SandboxPlan:
    return sandbox_plan(
        sandbox_id=SandboxId(sandbox_id),
        kind=kind,
        uuid="u",
        spec=spec,
        config=config,
        host=host,
        capacity=PLENTY,
        sources={},
        **more,
    )
