"""A file that describes directly attached network devices for a sandbox: refused, not passed over."""

import pytest

from pyshim.model.errors import Unimplemented
from tests.unit.sandbox.conftest import Stack, scenario


@scenario
async def test_a_sandbox_with_directly_attached_devices_is_refused_by_the_files_name(stack: Stack) -> None:
    stack.host.files["/run/kata-containers/dans/c1.json"] = b'{"devices": []}'

    with pytest.raises(Unimplemented, match=r"'/run/kata-containers/dans/c1\.json'"):
        await stack.create("c1", ["sleep"])


@scenario
async def test_a_file_for_another_sandbox_changes_nothing(stack: Stack) -> None:
    stack.host.files["/run/kata-containers/dans/c2.json"] = b'{"devices": []}'

    await stack.create("c1", ["sleep"])
