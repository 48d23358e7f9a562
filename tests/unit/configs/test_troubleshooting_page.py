"""Each row of the page's table is produced by a test with a kubelet, and no such test is left over."""

from integration.kubernetes.test_events import SCENES
from integration.kubernetes.troubleshooting import rows


def test_every_row_has_one_scene_and_every_scene_one_row() -> None:
    of_rows = [[part for part in SCENES if part in row.text] for row in rows()]

    assert sorted(part for found in of_rows for part in found) == sorted(SCENES)
    assert all(len(found) == 1 for found in of_rows)
