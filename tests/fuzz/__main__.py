"""`python -m tests.fuzz [--seconds S] [TARGET...]`: look for inputs that a parser neither reads nor refuses.

A finding is written into the corpus, as small as it gets, and printed with its error; the exit code is then 1. An input
that takes longer than SLOW_S of CPU time, or more memory than MAX_MEMORY_BYTES, is a finding as well. Each target runs
in a process of its own, so that an input on which the interpreter hangs or dies is known, too.
"""

import argparse
import hashlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

from tests.fuzz.mutation import MAX_BYTES, mutated, smallest
from tests.fuzz.targets import CORPUS, TARGETS, corpus

SLOW_S = 10.0
"""CPU time for one input of at most 256 KiB, which takes milliseconds: what is slower grows with more than its size."""
MAX_MEMORY_BYTES = 2 << 30
_HUNG_S = 120.0
"""After this long without a new input, the one under test hangs."""


class TooSlow(Exception):
    """The parser came to its end, but late."""


def run(name: str, data: bytes) -> None:
    """The parser has read or refused `data`. Raises whatever it should not have raised, or TooSlow."""
    began = time.process_time()
    TARGETS[name](data)
    if (took_s := time.process_time() - began) > SLOW_S:
        raise TooSlow(f"{took_s:.1f} s for {len(data)} bytes")


def error_of(name: str, data: bytes) -> Exception | None:
    try:
        run(name, data)
    except Exception as error:
        return error
    return None


def hunt(name: str, seconds: float, random: Random, under_test: int) -> bool:
    """Whether inputs tried for `seconds` were all read or refused; the file `under_test` has the one that is tried."""
    inputs = [data for path in corpus(name) if len(data := path.read_bytes()) <= MAX_BYTES]
    until = time.monotonic() + seconds
    tried = 0
    while time.monotonic() < until:
        data = mutated(inputs, random)
        os.ftruncate(under_test, 0)
        os.pwrite(under_test, data, 0)
        tried += 1
        error = error_of(name, data)
        if error is not None:
            small = _small(name, data, type(error))
            print(f"{name}: {tried} inputs, FOUND {keep(name, small)}: {small[:200]!r}", flush=True)
            traceback.print_exception(error_of(name, small), limit=-8, file=sys.stdout)
            return False
    print(f"{name}: {tried} inputs, nothing found", flush=True)
    return True


def hunt_apart(name: str, seconds: float, random: Random) -> bool:
    """As `hunt`, in a child; an input on which that hangs or dies is a finding."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            code = 2
            try:
                resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
                code = 0 if hunt(name, seconds, random, file.fileno()) else 1
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            finally:
                sys.stdout.flush()
                os._exit(code)
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            time.sleep(0.2)
            if time.time() - os.fstat(file.fileno()).st_mtime > _HUNG_S:
                os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(ended[1])
        if code in (0, 1):
            return code == 0
        data = os.pread(file.fileno(), MAX_BYTES, 0)
        print(f"{name}: HUNG OR DIED ({code}) on {keep(name, data)}: {data[:200]!r}", flush=True)
        return False


def _small(name: str, data: bytes, kind: type[Exception]) -> bytes:
    return smallest(data, lambda shorter: type(error_of(name, shorter)) is kind)


def keep(name: str, data: bytes) -> Path:
    """The finding is in the corpus."""
    path = CORPUS / name / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=60, help="for each target; default 60")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="repeats a run; default: the time")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.targets if name not in TARGETS]:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    print(f"--seed {arguments.seed}", flush=True)
    names = arguments.targets or list(TARGETS)
    clean = [hunt_apart(name, arguments.seconds, Random(f"{name} {arguments.seed}")) for name in names]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
