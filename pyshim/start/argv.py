"""The shim's command line, in the grammar of Go's `flag` package, which containerd writes for.

One or two dashes; `-x value` or `-x=value`; switches take a value only with `=`; the first word without a dash is the
action. Unlike Go, unknown flags are skipped, so that a later containerd with more flags still gets its shim.
"""

from pyshim.start.errors import BootstrapError

ACTIONS = ("start", "delete", "serve", "zygote")
_VALUES = (
    *("namespace", "address", "publish-binary", "id", "bundle", "config", "ttrpc-address", "idle", "directory"),
    "executed-because",
)
_SWITCHES = {"debug": "debug", "info": "info", "v": "version", "version": "version"}
# The spellings of Go's strconv.ParseBool.
_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_FALSE = ("0", "f", "F", "FALSE", "false", "False")


class Invocation:
    """One call of the shim binary; flags that were not given are empty or False."""

    def __init__(self) -> None:
        self.action = ""
        self.namespace = ""
        self.address = ""
        """containerd's gRPC socket."""
        self.publish_binary = ""
        self.id = ""
        self.bundle = ""
        self.ttrpc_address = ""
        """Ours, for `serve` only: `start` gets it in its environment."""
        self.config = ""
        """Ours, for `serve` only: the configuration's file, of a sandbox without a spec."""
        self.idle = ""
        """Ours, for `zygote` only: after how many seconds without a request it ends, 0 for never."""
        self.directory = ""
        """Ours, for `zygote` only: where its socket is."""
        self.executed_because = ""
        """Ours, for `serve` only: the reason why `start` executed it, and the zygote did not fork it."""
        self.debug = False
        self.info = False
        self.version = False


def parse(words: list[str]) -> Invocation:
    """The call that `words` (without the program's name) spell; raises BootstrapError naming the flag."""
    call = Invocation()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            call.action = call.action or word
            continue
        if word == "--":
            call.action = call.action or (rest[0] if rest else "")
            break
        name, equals, value = word.lstrip("-").partition("=")
        if name in _SWITCHES:
            setattr(call, _SWITCHES[name], _truth(word, value) if equals else True)
            continue
        if not equals:
            if name not in _VALUES and (not rest or _is_flag(rest[0]) or rest[0] in ACTIONS):
                continue
            if not rest:
                raise BootstrapError(f"parse flag {word!r}: it needs a value")
            value = rest.pop(0)
        if name in _VALUES:
            setattr(call, name.replace("-", "_"), value)
    return call


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-"


def _truth(word: str, value: str) -> bool:
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise BootstrapError(f"parse flag {word!r}: {value!r} is not a boolean")
