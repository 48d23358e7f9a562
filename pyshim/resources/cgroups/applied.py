"""The settings of a sandbox's cgroups: written to the host, and recorded with the reasons of those that failed."""

import logging
from collections.abc import Iterable

from pyshim.model.confinement import CgroupPlan, Group, GroupSetting, Role
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import CgroupMode
from pyshim.model.seams import Cgroups

log = logging.getLogger(__name__)


class AppliedSettings:
    def __init__(self, *, plan: CgroupPlan, host: Cgroups, sandbox_id: str) -> None:
        self._plan = plan
        self._host = host
        self._sandbox_id = sandbox_id
        self._written: dict[tuple[Role, str, str], GroupSetting] = {}
        self._notes: dict[str, None] = dict.fromkeys(plan.notes)

    @property
    def written(self) -> tuple[GroupSetting, ...]:
        """The last value of each setting that the host took."""
        return tuple(self._written.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each setting or rule that is not in force, in the order of discovery."""
        return tuple(self._notes)

    def note(self, *notes: str) -> None:
        """The notes are recorded; new ones are logged."""
        for note in notes:
            if note not in self._notes:
                log.warning("cgroups", extra={"sandbox": self._sandbox_id, "problem": note})
                self._notes[note] = None

    async def apply(self, settings: Iterable[GroupSetting]) -> None:
        """Each is written, or noted with the reason. Raises FailedPrecondition for a required one that failed."""
        by_role: dict[Role, list[GroupSetting]] = {}
        for setting in settings:
            by_role.setdefault(setting.role, []).append(setting)
        for role, wanted in by_role.items():
            group = self._plan.group(role)
            failed = await self._host.apply(group, wanted)
            for setting, problem in failed.items():
                text = self._failure(group, setting, problem)
                if setting.required:
                    raise FailedPrecondition(text)
                self.note(text)
            for setting in wanted:
                if setting not in failed:
                    self._written[role, setting.file, _line_key(setting)] = setting

    def _failure(self, group: Group, setting: GroupSetting, problem: str) -> str:
        if setting.controller == "devices" and self._plan.mode is CgroupMode.V2:
            return f"no device list for '{group.path}': {problem}"  # one cause for all its rules
        return f"set {setting.file} of '{group.path}' to '{setting.value}': {problem}"


def _line_key(setting: GroupSetting) -> str:
    """Distinguishes the settings of a file that takes several: by the rule, or by the line's device."""
    if setting.controller == "devices":
        return setting.value
    return setting.value.partition(" ")[0] if setting.controller in ("io", "blkio") else ""
