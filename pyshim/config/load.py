"""A sandbox's start: the file and the pod's annotations become one `Config`, or an error that names the culprit."""

import logging
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from pyshim.config.annotations import HYPERVISOR_NAME, with_annotations
from pyshim.config.effective import Effective, Level, Setting, examine
from pyshim.config.examined import MAX_KEPT, Examined
from pyshim.config.hashes import verify_assets
from pyshim.config.keys import Table, Verdict
from pyshim.config.sources import Source
from pyshim.config.values import toml_value
from pyshim.model.config import AgentConfig, Config, FactoryConfig, HypervisorConfig, RuntimeConfig
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.task import RuntimeOptions

log = logging.getLogger(__name__)

SUPPORTED_HYPERVISORS = frozenset({"qemu", "remote"})


def load_config(
    options: RuntimeOptions | None,
    annotations: Mapping[str, str],
    environment: Mapping[str, str],
    examined: Examined | None = None,
) -> Config:
    """The effective configuration of a new sandbox; its files may have been `examined` before.

    Raises ShimError naming file and key, or annotation.
    """
    effective = _for_pod((examined or Examined()).of(options, environment), annotations, os.path.exists)
    for warning in warnings(effective):
        log.warning("configuration", extra={"file": effective.source.path, "problem": warning})
    config = typed(effective)
    refuse_unsupported(effective)
    verify_assets(effective, annotations)
    return config


def judge(effective: Effective) -> None:
    """`load_config` needs no work for pods whose annotations change nothing. Raises what it raises."""
    typed(effective)
    warnings(effective)
    refused(effective)


def for_pod(
    source: Source, annotations: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists
) -> Effective:
    """Every key of `source` as a pod with `annotations` has it; `exists` answers for the files of the pod's node."""
    return _for_pod(examine(source), annotations, exists)


def _for_pod(examined: Effective, annotations: Mapping[str, str], exists: Callable[[str], bool]) -> Effective:
    chosen = annotations.get(HYPERVISOR_NAME, "")
    _check_choice(examined.source, chosen)
    effective = examine(examined.source, chosen) if chosen else examined
    raise_first_error(effective)
    return with_annotations(effective, annotations, exists=exists)


def _check_choice(source: Source, chosen: str) -> None:
    """A pod chooses among what its node's operator has set up: a hypervisor of this file."""
    tables = source.document.get("hypervisor") or {"qemu": {}}
    if chosen in SUPPORTED_HYPERVISORS and isinstance(tables, dict) and chosen not in tables:
        raise FailedPrecondition(
            f"refuse annotation '{HYPERVISOR_NAME}': '{source.path}' has no table hypervisor.{chosen}"
        )


def build_config(source: Source) -> Config:
    """`source` as a typed value. Raises InvalidArgument naming file and key for a wrong type or range."""
    effective = examine(source)
    raise_first_error(effective)
    return typed(effective)


def raise_first_error(effective: Effective) -> None:
    """Raises InvalidArgument when something in the file is wrong in itself."""
    if errors := effective.errors():
        first, more = errors[0], len(errors) - 1
        where = f"'{first.place.file}' line {first.place.line}" if first.place else f"'{effective.source.path}'"
        hint = f" (and {more} more: `pyshim config check`)" if more else ""
        raise InvalidArgument(f"read {first.subject} in {where}: {first.text}{hint}")


@lru_cache(MAX_KEPT)
def typed(effective: Effective) -> Config:
    """The nouns the rest of the shim reads. Raises FailedPrecondition when another hypervisor than ours is chosen."""
    if effective.hypervisor not in SUPPORTED_HYPERVISORS:
        chosen = f"hypervisor.{effective.hypervisor}"
        raise FailedPrecondition(
            f"start sandbox with '{effective.source.path}': {chosen} is not supported, only qemu and remote"
        )
    fields: dict[Table, dict[str, Any]] = {table: {} for table in Table}
    for setting in effective.settings.values():
        if setting.key.field:
            fields[setting.key.table][setting.key.field] = setting.value
    return Config(
        source=effective.source.path,
        annotated={
            setting.key.name: setting.annotation for setting in effective.settings.values() if setting.annotation
        },
        hypervisor_name=effective.hypervisor,
        hypervisor=HypervisorConfig(**fields[Table.HYPERVISOR]),
        agent=AgentConfig(**fields[Table.AGENT]),
        runtime=RuntimeConfig(**fields[Table.RUNTIME]),
        factory=FactoryConfig(**fields[Table.FACTORY]),
    )


def refuse_unsupported(effective: Effective) -> None:
    """Raises FailedPrecondition naming every setting that would promise what is not there, and where it was made."""
    asked = "; ".join(
        f"{effective.dotted(setting.key)} = {toml_value(setting.value)} ({setting.origin})"
        for setting in refused(effective)
    )
    if asked:
        raise FailedPrecondition(f"start sandbox with '{effective.source.path}': not supported yet: {asked}")


@lru_cache(MAX_KEPT)
def refused(effective: Effective) -> tuple[Setting, ...]:
    """Settings no sandbox may start with: to ignore them would leave a pod less safe than its owner believes."""
    return tuple(setting for setting in effective.settings.values() if setting.verdict is Verdict.REFUSED)


@lru_cache(MAX_KEPT)
def warnings(effective: Effective) -> tuple[str, ...]:
    """One sentence for each key that is set in vain: unknown, removed, or without effect and not the default."""
    found = []
    for finding in effective.findings:
        if finding.level is Level.WARNING:
            found.append(f"{finding.subject} {finding.text}")
        elif finding.verdict is Verdict.NO_EFFECT and finding.decisive:
            found.append(f"{finding.subject} has no effect: {finding.text}")
    return tuple(found)
