"""`ctr`, containerd's own client, as the tests call it: results with code, output and error; background runs;
terminals.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import processes
from .images import IMAGE
from .runtime import Runtime
from .terminal import Terminal
from .waiting import PATIENCE_S, eventually

_LIMIT_S = 120.0
_exec_ids = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One finished `ctr`. For `run` and `exec` its code is the process's exit status."""

    command: str
    code: int
    stdout: bytes
    stderr: bytes
    took_s: float

    @property
    def out(self) -> str:
        return self.stdout.decode(errors="replace")

    @property
    def err(self) -> str:
        return self.stderr.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def rows(self) -> list[dict[str, str]]:
        """A table with a heading line, as `ctr task ls` prints it."""
        heading, *rest = self.lines
        return [dict(zip(heading.split(), line.split(), strict=False)) for line in rest if line.strip()]

    def __str__(self) -> str:
        return f"{self.command}\n  code {self.code}\n  stdout {self.out[-2000:]!r}\n  stderr {self.err[-4000:]!r}"


class Background:
    """A `ctr` that runs beside the test, its output collected in files (a pipe without a reader would stop it)."""

    def __init__(self, process: subprocess.Popen[bytes], command: str, stdout: Path, stderr: Path) -> None:
        self.process, self.command = process, command
        self._stdout, self._stderr = stdout, stderr
        self._started = time.monotonic()

    def out(self) -> str:
        return self._stdout.read_text(errors="replace")

    def err(self) -> str:
        return self._stderr.read_text(errors="replace")

    def wait_for(self, text: str, within_s: float = PATIENCE_S) -> None:
        def look() -> bool:
            if text in self.out():
                return True
            if self.process.poll() is not None and text not in self.out():
                raise AssertionError(f"ended before it printed {text!r}: {self.command}: {self.out()!r} {self.err()!r}")
            return text in self.out()

        eventually(look, what=lambda: f"{text!r} in the output of {self.command}: {self.out()!r}", within_s=within_s)

    def wait(self, within_s: float = _LIMIT_S) -> Result:
        code = self.process.wait(within_s)
        took_s = time.monotonic() - self._started
        stdout, stderr = self._stdout.read_bytes(), self._stderr.read_bytes()
        return Result(command=self.command, code=code, stdout=stdout, stderr=stderr, took_s=took_s)


class Ctr:
    """Calls `ctr` against one containerd. A failed call raises with everything it said unless `check=False`."""

    def __init__(self, *, program: Path, socket: Path, environment: Mapping[str, str]) -> None:
        self._start = (str(program), "--address", str(socket))
        self.environment = dict(environment)

    def argv(self, *words: str | Path) -> list[str]:
        return [*self._start, *map(str, words)]

    def __call__(
        self, *words: str | Path, input: bytes | None = None, check: bool = True, within_s: float = _LIMIT_S
    ) -> Result:
        argv = self.argv(*words)
        started = time.monotonic()
        stdin: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        try:
            done = subprocess.run(argv, capture_output=True, env=self.environment, timeout=within_s, **stdin)
        except subprocess.TimeoutExpired as exc:
            raise AssertionError(
                f"no end within {within_s:g} s: {shlex.join(argv)}: {exc.stdout!r} {exc.stderr!r}"
            ) from None
        took_s = time.monotonic() - started
        result = Result(
            command=shlex.join(argv), code=done.returncode, stdout=done.stdout, stderr=done.stderr, took_s=took_s
        )
        if check and result.code != 0:
            raise AssertionError(f"failed: {result}")
        return result

    @contextlib.contextmanager
    def background(self, directory: Path, *words: str | Path, stdin: int = subprocess.DEVNULL) -> Iterator[Background]:
        """`ctr` running beside the block, ended (TERM, then KILL) when the block is left."""
        argv = self.argv(*words)
        count = len(list(directory.glob("ctr-*.out")))
        stdout, stderr = directory / f"ctr-{count}.out", directory / f"ctr-{count}.err"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(argv, stdin=stdin, stdout=out, stderr=err, env=self.environment)
        try:
            yield Background(process, shlex.join(argv), stdout, stderr)
        finally:
            if process.stdin:
                process.stdin.close()
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    @contextlib.contextmanager
    def on_terminal(self, *words: str | Path, rows: int = 24, columns: int = 80) -> Iterator[Terminal]:
        """`ctr` on a pseudo-terminal of the given size, as a user types it."""
        argv = self.argv(*words)
        with Terminal.open(argv, {**self.environment, "TERM": "dumb"}, rows=rows, columns=columns) as terminal:
            yield terminal

    # -- what the tests ask again and again --------------------------------------------------------------------------

    def run_words(self, *options: str | Path, config: Path | None = None) -> tuple[str | Path, ...]:
        """`run` with the runtime under test, its configuration file and `options`; image, name and command follow."""
        file = () if config is None else ("--runtime-config-path", config)
        return ("run", "--runtime", Runtime.chosen().name, *file, *options)

    def start(
        self,
        name: str,
        *options: str | Path,
        config: Path | None = None,
        command: Sequence[str | Path] = ("sleep", "100000"),
    ) -> Result:
        """A container of the test image runs in the background."""
        return self(*self.run_words("--detach", *options, config=config), IMAGE, name, *command)

    def run(
        self,
        name: str,
        *command: str | Path,
        options: Sequence[str | Path] = (),
        config: Path | None = None,
        **call: Any,
    ) -> Result:
        """A container of the test image has run to its end and is removed."""
        words = self.run_words("--rm", *options, config=config)
        return self(*words, IMAGE, name, *command, **call)

    def inside(self, container: str, *command: str | Path, **call: Any) -> Result:
        """A process added to a running container has run to its end."""
        return self("task", "exec", "--exec-id", f"inside{next(_exec_ids)}", container, *command, **call)

    def state_of(self, container: str) -> str | None:
        """RUNNING, STOPPED, PAUSED, CREATED; None when there is no such task."""
        for row in self("task", "ls").rows():
            if row.get("TASK") == container:
                return row.get("STATUS")
        return None

    def wait_for_state(self, container: str, state: str | None, within_s: float = PATIENCE_S) -> None:
        seen: list[str | None] = [None]

        def look() -> bool:
            seen[0] = self.state_of(container)
            return seen[0] == state

        eventually(look, what=lambda: f"task {container!r} is {state}, last seen {seen[0]}", within_s=within_s)

    def _is_at_rest(self, container: str) -> bool:
        return self.state_of(container) in (None, "STOPPED", "CREATED")

    def remove(self, containers: Sequence[str]) -> None:
        """No task, container or snapshot of these names is left. For clean-up: asks nothing of their state.

        Raises AssertionError where that took a SIGKILL for VMM and shim, when all is removed: the failure stays the
        one of its test.
        """
        problems = []
        for container in containers:
            try:
                self._end(container)
            except AssertionError as error:
                killed = processes.kill_sandbox(container)
                self._end(container)
                problems.append(f"end {container!r}: {error}; killed {[str(process) for process in killed]}")
            self("task", "rm", "--force", container, check=False, within_s=30)
            self("container", "rm", container, check=False, within_s=30)
        assert not problems, "\n".join(problems)

    def _end(self, container: str) -> None:
        self("task", "kill", "--signal", "KILL", "--all", container, check=False, within_s=30)
        eventually(partial(self._is_at_rest, container), what=f"task {container!r} stopped")
