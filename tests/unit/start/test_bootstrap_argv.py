import pytest

from pyshim.start.argv import parse
from pyshim.start.errors import BootstrapError

START = "-namespace k8s.io -address /c.sock -publish-binary /usr/bin/containerd -id abc start"


@pytest.mark.parametrize(
    "line",
    [
        START,
        START.replace(" -", " --").replace("-namespace", "--namespace", 1),
        "-namespace=k8s.io --address=/c.sock -publish-binary=/usr/bin/containerd -id=abc start",
        START + " more words -that=mean nothing",
        "-from-the-future=yes " + START,
        "-from-the-future yes " + START,
        "-from-the-future " + START,
        START.replace("start", "-from-the-future start"),
    ],
    ids=["single dash", "double dash", "equals", "extra words", "unknown=", "unknown value", "unknown switch", "last"],
)
def test_spellings_of_one_call_mean_the_same(line: str) -> None:
    call = parse(line.split())

    assert (call.action, call.namespace, call.address, call.id) == ("start", "k8s.io", "/c.sock", "abc")
    assert call.publish_binary == "/usr/bin/containerd"
    assert (call.debug, call.info, call.version, call.bundle) == (False, False, False, "")


@pytest.mark.parametrize(
    ("line", "debug"),
    [("-debug start", True), ("-debug=true start", True), ("-debug=0 start", False), ("--debug=F start", False)],
)
def test_switches_take_a_value_only_with_an_equals_sign(line: str, debug: bool) -> None:
    call = parse(line.split())

    assert (call.debug, call.action) == (debug, "start")


def test_delete_has_a_bundle_and_may_have_debug() -> None:
    call = parse("-namespace ns -address /c.sock -publish-binary /x -id abc -bundle /b/abc -debug delete".split())

    assert (call.action, call.bundle, call.debug) == ("delete", "/b/abc", True)


@pytest.mark.parametrize("words", [["-v"], ["-version"], ["--version"]])
def test_both_names_of_version(words: list[str]) -> None:
    assert parse(words).version


def test_info_needs_no_action() -> None:
    call = parse(["-info"])

    assert (call.info, call.action) == (True, "")


def test_words_after_a_double_dash_are_no_flags() -> None:
    call = parse(["-id", "a", "--", "start", "-id", "b"])

    assert (call.action, call.id) == ("start", "a")


def test_empty_value_is_a_value() -> None:
    call = parse(["-publish-binary", "", "-id", "a", "start"])

    assert (call.publish_binary, call.id, call.action) == ("", "a", "start")


def test_value_may_look_like_a_flag() -> None:
    assert parse(["-id", "-x", "start"]).id == "-x"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-id"], "parse flag '-id': it needs a value"),
        (["-debug=maybe", "start"], "parse flag '-debug=maybe': 'maybe' is not a boolean"),
    ],
)
def test_unreadable_flag_is_named(words: list[str], text: str) -> None:
    with pytest.raises(BootstrapError) as caught:
        parse(words)

    assert str(caught.value) == text


@pytest.mark.parametrize("words", [[], ["-"], ["--"], ["-="], ["---x"], ["=", "-"]])
def test_odd_words_do_not_crash(words: list[str]) -> None:
    parse(words)
