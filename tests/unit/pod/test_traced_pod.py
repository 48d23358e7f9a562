"""The spans of a pod's life leave the shim if the pod is traced, and none leaves otherwise."""

from tests.unit.pod.conftest import DOCUMENT, Stack

TRACED = {**DOCUMENT, "runtime": {"enable_tracing": True, "otlp_endpoint": "http://collector:4318"}}


async def live(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])
    exec_id = await stack.exec("c1", "e1", ["exit", "0"])
    await stack.pod.start("c1", exec_id)
    await stack.pod.wait("c1", exec_id)
    await stack.pod.kill("c1", None, 9, False)
    await stack.pod.wait("c1", None)
    await stack.delete_last("c1")


async def test_the_whole_life_of_a_traced_pod_has_spans(stack: Stack) -> None:
    stack.document = TRACED

    await live(stack)

    spans = stack.spans.names()
    assert sorted(name for name, within in spans if not within) == [
        *("create c1", "delete c1", "end sandbox", "exec c1/e1", "start c1")
    ]
    for step in (
        ("read configuration", "create c1"),
        ("start vmm", "create c1"),
        ("agent CreateSandbox", "set up guest"),
        ("agent StartContainer", "start c1"),
        ("agent ExecProcess", "exec c1/e1"),
        ("stop vm", "end sandbox"),
        ("agent DestroySandbox", "stop vm"),
        ("agent RemoveContainer", "delete c1"),
    ):
        assert step in spans, step
    assert sum(name == "leave cgroups" for name, _ in spans) == 1
    assert stack.traced_to == ["http://collector:4318"]
    assert stack.agent.contexts["StartContainer"]


async def test_a_pod_that_is_not_traced_sends_no_spans_and_saves_the_same(stack: Stack) -> None:
    await live(stack)

    assert stack.spans.heard == {}
    assert stack.traced_to == []
    assert not any(stack.agent.contexts.values())


async def test_the_state_has_the_same_spans_whether_they_leave_or_not(stack: Stack) -> None:
    await stack.run("c1", ["sleep"])
    untold = [span.name for span in stack.pod._trace.spans]

    other = Stack()
    other.document = TRACED
    await other.run("c1", ["sleep"])

    assert [span.name for span in other.pod._trace.spans] == untold
    assert "create c1" in untold
    assert "start c1" in untold
    await other.close()
