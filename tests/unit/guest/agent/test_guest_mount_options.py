"""Option words and drivers of storages, as the guest agent takes them."""

from __future__ import annotations

import errno

import pytest

from guest.agent import mounts
from guest.agent import syscalls as sys
from guest.agent.errors import Internal, InvalidArgument
from guest.agent.storage import table


@pytest.mark.parametrize(
    ("words", "flags", "propagation", "data"),
    [
        (["ro", "nosuid"], sys.MS_RDONLY | sys.MS_NOSUID, 0, ""),
        (["ro", "rw"], 0, 0, ""),
        (["rbind", "rprivate"], sys.MS_BIND | sys.MS_REC, sys.MS_PRIVATE | sys.MS_REC, ""),
        (["size=1m,mode=755", "noexec"], sys.MS_NOEXEC, 0, "size=1m,mode=755"),
        (["", "defaults"], 0, 0, ""),
    ],
)
def test_option_words_become_flags_propagation_and_data(
    words: list[str], flags: int, propagation: int, data: str
) -> None:
    options = mounts.MountOptions(words)

    assert (options.flags, options.propagation, options.data) == (flags, propagation, data)


def test_more_mount_data_than_the_kernel_takes_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="4096 bytes"):
        mounts.MountOptions(["lowerdir=" + "x" * 4087])


def test_hugepage_options_need_size_and_page_size() -> None:
    for words in ([], ["pagesize=0,size=1"], ["pagesize=x,size=1"]):
        with pytest.raises(InvalidArgument):
            table.allocate_hugepages(words)


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
