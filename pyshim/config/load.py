"""Loads a sandbox's configuration: file, drop-ins and the pod's annotations become one `Config`.

Configurations that were read before are kept: a zygote reads each file once, for all its forks.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from pyshim.config.annotations import HYPERVISOR_NAME, verify_assets, with_annotations
from pyshim.config.effective import (
    PROGRAM_PATHS,
    SUPPORTED_HYPERVISORS,
    UNSUPPORTED,
    Effective,
    Level,
    Setting,
    examine,
)
from pyshim.config.keys import Table, Verdict
from pyshim.config.keys_runtime import OTHER_VMMS
from pyshim.config.sources import Source, read_files, read_source, source_files
from pyshim.config.values import toml_value
from pyshim.host.file_answers import file_identity, is_settled
from pyshim.model.config import AgentConfig, Config, FactoryConfig, HypervisorConfig, RuntimeConfig
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.task import RuntimeOptions

log = logging.getLogger(__name__)

MAX_CONFIGS = 16
"""More than the handlers of a node have. A client that names a new file each time only makes the cache start again."""


class _Inputs(NamedTuple):
    """What a configuration is computed from, besides its text: equal inputs give an equal configuration."""

    files: tuple[tuple[str, str], ...]
    """The path and identity of each file."""
    programs: tuple[str, ...]
    """The paths of PROGRAM_PATHS that exist."""


class ConfigCache:
    def __init__(self, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._entries: dict[str, tuple[_Inputs, Effective]] = {}
        """By the path of the main file."""

    def get(self, options: RuntimeOptions | None, environment: Mapping[str, str]) -> Effective:
        """The configuration before a pod's annotations. Its files are read again only after a change.

        Raises InvalidArgument or FailedPrecondition naming the file.
        """
        files = source_files(options, environment)
        if not files:
            return examine(read_source(options, environment))
        inputs, _ = self._inputs(files)
        if files[0] in self._entries and self._entries[files[0]][0] == inputs:
            return self._entries[files[0]][1]
        effective = examine(read_files(files))
        if (inputs, True) == self._inputs(files):
            if len(self._entries) == MAX_CONFIGS:
                self._entries.clear()
            self._entries[files[0]] = (inputs, effective)
        return effective

    def _inputs(self, files: tuple[str, ...]) -> tuple[_Inputs, bool]:
        """The present inputs, and whether every later change of a file will change them."""
        found: list[tuple[str, str]] = []
        settled, now_ns = True, self._clock_ns()
        for file in files:
            try:
                status = os.stat(file)
            except OSError:
                settled = False  # `read_files` reports the error
                continue
            found.append((file, file_identity(status)))
            settled = settled and is_settled(status, now_ns)
        programs = tuple(path for paths in PROGRAM_PATHS.values() for path in paths if os.access(path, os.X_OK))
        return _Inputs(tuple(found), programs), settled


def load_config(
    options: RuntimeOptions | None,
    annotations: Mapping[str, str],
    environment: Mapping[str, str],
    cache: ConfigCache | None = None,
) -> Config:
    """The effective configuration of a new sandbox, whose pod has `annotations`. Warnings are logged.

    Raises ShimError naming file and key, or the annotation.
    """
    effective = _for_pod((cache or ConfigCache()).get(options, environment), annotations, os.path.exists)
    for place, warning in _placed_warnings(effective):
        log.warning("configuration", extra={"file": place, "problem": warning})
    config = typed(effective)
    refuse_unsupported(effective)
    verify_assets(effective, annotations)
    return config


def fill_caches(effective: Effective) -> None:
    """`load_config` computes nothing more for a pod whose annotations change nothing. Raises as `typed`."""
    typed(effective)
    warnings(effective)
    refused(effective)


def for_pod(
    source: Source, annotations: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists
) -> Effective:
    """The effective configuration of a pod with `annotations`; `exists` looks for files on the pod's node.

    Raises InvalidArgument or FailedPrecondition naming file and key, or the annotation.
    """
    return _for_pod(examine(source), annotations, exists)


def _for_pod(examined: Effective, annotations: Mapping[str, str], exists: Callable[[str], bool]) -> Effective:
    chosen = annotations.get(HYPERVISOR_NAME, "")
    _check_choice(examined.source, chosen)
    effective = examine(examined.source, chosen) if chosen in SUPPORTED_HYPERVISORS else examined
    raise_first_error(effective)
    return with_annotations(effective, annotations, exists=exists)


def _check_choice(source: Source, chosen: str) -> None:
    """A pod may only choose a hypervisor that the node's operator has configured."""
    if chosen in OTHER_VMMS:
        raise FailedPrecondition(f"refuse annotation '{HYPERVISOR_NAME}': {chosen} {UNSUPPORTED}")
    tables = source.document.get("hypervisor") or {"qemu": {}}
    if chosen in SUPPORTED_HYPERVISORS and isinstance(tables, dict) and chosen not in tables:
        raise FailedPrecondition(
            f"refuse annotation '{HYPERVISOR_NAME}': '{source.path}' has no table hypervisor.{chosen}"
        )


def build_config(source: Source) -> Config:
    """`source` as a typed value. Raises InvalidArgument naming file and key for an invalid value."""
    effective = examine(source)
    raise_first_error(effective)
    return typed(effective)


def raise_first_error(effective: Effective) -> None:
    """Raises FailedPrecondition if the document is for another VMM, InvalidArgument if a value or table is invalid."""
    if errors := effective.errors():
        first, more = errors[0], len(errors) - 1
        where = f"'{first.place.file}' line {first.place.line}" if first.place else f"'{effective.source.path}'"
        hint = f" (and {more} more: `pyshim config check`)" if more else ""
        if effective.hypervisor not in SUPPORTED_HYPERVISORS:
            raise FailedPrecondition(f"start sandbox with {where}: {first.subject} {first.text}")
        raise InvalidArgument(f"read {first.subject} in {where}: {first.text}{hint}")


@lru_cache(MAX_CONFIGS)
def typed(effective: Effective) -> Config:
    """`effective` as a typed value. Raises FailedPrecondition if its hypervisor is not supported."""
    if effective.hypervisor not in SUPPORTED_HYPERVISORS:
        raise_first_error(effective)
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
    """Raises FailedPrecondition naming every refused setting and where it was set."""
    asked = "; ".join(
        f"{effective.dotted(setting.key)} = {toml_value(setting.value)} ({setting.origin})"
        for setting in refused(effective)
    )
    if asked:
        raise FailedPrecondition(f"start sandbox with '{effective.source.path}': not supported yet: {asked}")


@lru_cache(MAX_CONFIGS)
def refused(effective: Effective) -> tuple[Setting, ...]:
    """The settings with which no sandbox starts: without them a pod would be less safe than its owner believes."""
    return tuple(setting for setting in effective.settings.values() if setting.verdict is Verdict.REFUSED)


@lru_cache(MAX_CONFIGS)
def warnings(effective: Effective) -> tuple[str, ...]:
    """A sentence for each unknown or removed key, and for each key without effect whose value is not the default."""
    return tuple(text for _place, text in _placed_warnings(effective))


def _placed_warnings(effective: Effective) -> Iterator[tuple[str, str]]:
    """The warnings, each with its file and line."""
    for finding in effective.findings:
        place = str(finding.place or effective.source.path)
        if finding.level is Level.WARNING:
            yield place, f"{finding.subject} {finding.text}"
        elif finding.verdict is Verdict.NO_EFFECT and finding.differs:
            yield place, f"{finding.subject} has no effect: {finding.text}"
