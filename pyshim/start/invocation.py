"""One call of the shim's binary: its command line, the pod that its bundle belongs to, and its one error.

The command line has the grammar of Go's `flag` package, which containerd writes for. One or two dashes; `-x value` or
`-x=value`; switches take a value only with `=`; the first word without a dash is the action. Unlike Go, unknown flags
are skipped, so that a later containerd with more flags still gets its shim.

The error is apart from `pyshim.model.errors` because that tree needs `enum`, which costs `start` more than all of its
own code.
"""

import errno
import os

from pyshim.start.stdlib import parse_json


class CommandError(Exception):
    """A foreground call failed; `str(error)` is the one line containerd shows: `verb object: cause`."""


def os_failure(action: str, target: str, error: OSError) -> CommandError:
    """The error that `action` on `target` met, as `verb object: cause`: the errno's name, then its text."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    return CommandError(f"{action} {target!r}: {name} ({os.strerror(number).lower()})")


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
    """The call that `words` (without the program's name) spell; raises CommandError naming the flag."""
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
                raise CommandError(f"parse flag {word!r}: it needs a value")
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
    raise CommandError(f"parse flag {word!r}: {value!r} is not a boolean")


# The annotation that says that a container belongs to a pod, and the one that names the pod, of CRI-O, containerd and
# cri-dockerd. As pyshim.model.oci has them. Not io.containerd.runc.v2.group, with which runc's shim serves unrelated
# containers in one process to save memory: here it would put them into one virtual machine.
_POD_ANNOTATIONS = (
    ("io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri-o.SandboxID"),
    ("io.kubernetes.cri.container-type", "io.kubernetes.cri.sandbox-id"),
    ("io.kubernetes.docker.type", "io.kubernetes.sandbox.id"),
)
_IN_A_POD = "container"
_MAX_ID_CHARS = 76


def group_id(bundle: str, container_id: str) -> str:
    """The id under which containers share a shim and a virtual machine: the pod's, or the container's own.

    For annotations that make no sense it is the container's own; Create refuses those, with an error of its own.
    Raises CommandError naming the file or the annotation. A bundle without config.json is that of a sandbox which is
    made through containerd's Sandbox API.
    """
    path = f"{bundle}/config.json"
    try:
        with open(path, "rb") as file:
            spec = parse_json(file.read())
    except FileNotFoundError as error:
        if not os.path.isdir(bundle):
            raise os_failure("read spec", path, error) from error
        return checked_id(container_id, "flag -id")
    except OSError as error:
        raise os_failure("read spec", path, error) from error
    except (ValueError, RecursionError) as error:
        raise CommandError(f"parse spec {path!r}: {error}") from error
    annotations = spec.get("annotations") if isinstance(spec, dict) else None
    if isinstance(annotations, dict):
        found = [keys for keys in _POD_ANNOTATIONS if annotations.get(keys[0]) is not None]
        if len(found) == 1:
            kind, name = found[0]
            group = annotations.get(name) if annotations[kind] == _IN_A_POD else None
            if isinstance(group, str) and group:
                return checked_id(group, f"annotation {name}")
    return checked_id(container_id, "flag -id")


def require_spec(bundle: str) -> None:
    """Raises CommandError unless the bundle has a spec."""
    path = f"{bundle}/config.json"
    try:
        os.stat(path)
    except OSError as error:
        raise os_failure("read spec", path, error) from error


def checked_id(text: str, what: str) -> str:
    """`text` when it is an identifier by containerd's rule, and so one safe path component; else CommandError.

    The rule of pyshim.model.ids.checked_id, without `re`.
    """
    words = text.replace("-", ".").replace("_", ".").split(".")
    if len(text) > _MAX_ID_CHARS or not all(word.isascii() and word.isalnum() for word in words):
        raise CommandError(f"check {what} {text[:100]!r}: not a valid identifier")
    return text
