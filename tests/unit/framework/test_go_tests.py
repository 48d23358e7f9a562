"""What the conformance harness reads from a Go test program's output."""

from __future__ import annotations

from integration.conformance.cri_integration import read_log

_LOG = """\
=== RUN   TestPasses
    some_test.go:12: Create a pod
--- PASS: TestPasses (0.10s)
=== RUN   TestSkips
    some_test.go:20: requires cgroup v2
--- SKIP: TestSkips (0.00s)
=== RUN   TestGroup
=== RUN   TestGroup/one
=== RUN   TestGroup/two
    some_test.go:33: Start it
    some_test.go:34:
        \tError Trace:\t/src/some_test.go:34
        \tError:      \tNot equal:
        \t            \texpected: 1
--- FAIL: TestGroup (1.00s)
    --- PASS: TestGroup/one (0.50s)
    --- FAIL: TestGroup/two (0.50s)
=== RUN   TestEndsBadly
=== RUN   TestEndsBadly/sub
=== NAME  TestEndsBadly
    some_test.go:40: pod is left
--- FAIL: TestEndsBadly (0.10s)
    --- PASS: TestEndsBadly/sub (0.05s)
=== RUN   TestPanics
panic: runtime error
"""


def test_each_test_has_its_result_and_its_reason_and_a_group_counts_by_what_is_in_it() -> None:
    read = [(spec.name, spec.status, spec.reason) for spec in read_log(_LOG)]

    assert read == [
        ("TestPasses", "passed", ""),
        ("TestSkips", "skipped", "requires cgroup v2"),
        ("TestGroup/one", "passed", ""),
        ("TestGroup/two", "failed", "Not equal: expected: 1"),
        ("TestEndsBadly", "failed", "pod is left"),
        ("TestEndsBadly/sub", "passed", ""),
        ("TestPanics", "unfinished", ""),
    ]
