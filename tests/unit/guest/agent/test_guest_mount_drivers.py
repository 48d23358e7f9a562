"""A file system whose driver another program is loading at this moment: the mount is tried again, within limits."""

import errno

import pytest

from guest.agent import mounts
from guest.agent.errors import Internal


@pytest.mark.parametrize("refusals", [0, 1, 3])
def test_mount_is_tried_again_while_the_driver_is_not_there_yet(monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
    calls: list[str] = []

    def mount(source: str, target: str, fstype: str, flags: int, data: str) -> None:
        calls.append(fstype)
        if len(calls) <= refusals:
            raise OSError(errno.ENODEV, "no such device")

    monkeypatch.setattr(mounts.sys, "mount", mount)

    mounts.mount("tag", "/somewhere", "virtiofs", [])

    assert calls == ["virtiofs"] * (refusals + 1)


@pytest.mark.parametrize(("error", "tries"), [(errno.ENODEV, 4), (errno.EINVAL, 1)], ids=["unknown", "refused"])
def test_an_unknown_driver_and_other_errors_are_reported(
    monkeypatch: pytest.MonkeyPatch, error: int, tries: int
) -> None:
    calls: list[str] = []

    def mount(source: str, target: str, fstype: str, flags: int, data: str) -> None:
        calls.append(fstype)
        raise OSError(error, "no")

    monkeypatch.setattr(mounts.sys, "mount", mount)

    with pytest.raises(Internal, match=rf"mount 'tag' \(nofs\) on '/somewhere': {errno.errorcode[error]}"):
        mounts.mount("tag", "/somewhere", "nofs", [])
    assert len(calls) == tries
