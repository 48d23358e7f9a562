"""UUIDs by the kernel."""

import uuid

from pyshim.host.uuids import new_uuid


def test_uuids_are_random_ones_and_no_two_the_same() -> None:
    made = [new_uuid() for _ in range(100)]

    assert len(set(made)) == 100
    assert {uuid.UUID(each).version for each in made} == {4}
    assert all(str(uuid.UUID(each)) == each for each in made)
