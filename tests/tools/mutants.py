"""Which faults the tests of a room notice: `python -m tests.tools.mutants SOURCE... --tests TEST... [--sample N]`.

Makes small faults (mutants) in the functions of the source files: a comparison, a condition, a constant or an operator
is changed, a statement is left out, a result is None. For each mutant, the tests that call its function run in a fork
of this process, which has collected them. Prints the mutants that no test notices, and for each test function how many
mutants it notices, how many of them no other does, and whether a smallest set of tests (by the greedy algorithm) that
notices as much has need of it. What a test says to its reader, no mutant can tell: read before you cut.

Mutants are in functions only, and tests that run the product in a process of its own notice none.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

Place = tuple[str, int]
"""The file and the first line of a function."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    one: other
    for pair in ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE))
    for one, other in (pair, pair[::-1])
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    one: other
    for pair in ((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitOr, ast.BitAnd), (ast.LShift, ast.RShift))
    for one, other in (pair, pair[::-1])
}
_LEFT_OUT = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)
_PATIENCE = 5.0
"""A mutant's tests may take so many times as long as without it, and `_PATIENCE_S` more; then it was noticed."""
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mutant:
    path: str
    line: int
    what: str
    function: Place
    codes: Mapping[Place, CodeType]
    """The functions that change: the outermost one around the fault, and those inside it."""

    def __str__(self) -> str:
        return f"{os.path.relpath(self.path)}:{self.line}: {self.what}"


def count_mutants(path: str) -> int:
    return sum(1 for function in _outermost(_tree(path)) for _ in _faults(function))


def mutants_of(path: str, wanted: Collection[int]) -> Iterator[Mutant]:
    """The mutants of the file with these numbers."""
    tree = _tree(path)
    number = -1
    for function in _outermost(tree):
        first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
        for line, what in _faults(function):
            number += 1
            if number in wanted:
                changed = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
                codes = {
                    (path, code.co_firstlineno): code
                    for code in _codes(changed)
                    if first <= code.co_firstlineno <= (function.end_lineno or 0) and not code.co_name.startswith("<")
                }
                yield Mutant(path=path, line=line, what=what, function=(path, first), codes=codes)


def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(), path)


def _outermost(tree: ast.AST) -> Iterator[Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node
        else:
            yield from _outermost(node)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _faults(function: Function) -> Iterator[tuple[int, str]]:
    """Makes one fault after the other in the tree, and undoes it before the next."""
    for statement in function.body:
        for parent in ast.walk(statement):
            yield from _faults_at(parent)
    yield from _left_out(function.body)


def _faults_at(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Assert():
            return
        case ast.Compare(ops=[first, *_]) if type(first) in _FLIPPED:
            yield from _with(node.ops, 0, _FLIPPED[type(first)](), node.lineno, "another comparison")
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield from _with_attribute(node, "op", other, node.lineno, "'and' and 'or' exchanged")
        case ast.BinOp() if type(node.op) in _OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield from _with_attribute(node, "op", _OPERATORS[type(node.op)](), node.lineno, "another operator")
        case ast.Constant(value=bool() as value):
            yield from _with_attribute(node, "value", not value, node.lineno, f"{not value} for {value}")
        case ast.Constant(value=int() as value):
            yield from _with_attribute(node, "value", value + 1, node.lineno, f"{value + 1} for {value}")
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield from _with_attribute(node, "value", ast.Constant(None), node.lineno, "returns None")
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
        negated = ast.UnaryOp(ast.Not(), node.test)
        yield from _with_attribute(node, "test", negated, node.test.lineno, "condition negated")
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        if isinstance(statements, list):
            yield from _left_out(statements)


def _left_out(statements: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for number, statement in enumerate(statements):
        text = ast.unparse(statement)
        is_silent = text.startswith("log.") or isinstance(getattr(statement, "value", None), ast.Constant)
        if isinstance(statement, _LEFT_OUT) and not is_silent:
            left = ast.Pass(lineno=statement.lineno, col_offset=statement.col_offset)
            yield from _with(statements, number, left, statement.lineno, f"no {text[:60]!r}")


def _with(items: list[Any], at: int, new: ast.AST, line: int, what: str) -> Iterator[tuple[int, str]]:
    old, items[at] = items[at], new
    yield line, what
    items[at] = old


def _with_attribute(node: ast.AST, name: str, new: object, line: int, what: str) -> Iterator[tuple[int, str]]:
    old = getattr(node, name)
    setattr(node, name, new)
    yield line, what
    setattr(node, name, old)


@dataclass(slots=True)
class Trial:
    """A pytest plugin that tries mutants in place of the usual run."""

    mutants: Sequence[Mutant]
    say: Callable[[str], None]
    stop_at_first: bool = False
    names: list[str] = field(default_factory=list)
    """Of the tests that pass without a mutant."""
    seconds: list[float] = field(default_factory=list)
    noticed: dict[Mutant, frozenset[int]] = field(default_factory=dict)
    """The tests that failed; -1 stands for a run that did not end."""
    unreached: list[Mutant] = field(default_factory=list)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("collection failed")
        functions: dict[Place, list[FunctionType]] = defaultdict(list)
        files = {mutant.path for mutant in self.mutants}
        for file in sorted(files):  # also one that the tests import only when they run
            importlib.import_module(".".join(Path(file).relative_to(Path.cwd()).with_suffix("").parts))
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename in files:
                functions[each.__code__.co_filename, each.__code__.co_firstlineno].append(each)
        plain = _in_fork(lambda: _traced(session.items, files), 3600.0)
        assert isinstance(plain, list), "the tests end without a mutant"
        passed = [(item, facts) for item, facts in zip(session.items, plain, strict=True) if not facts["failed"]]
        self.say(f"{len(session.items)} tests, {len(passed)} of them pass; {len(self.mutants)} mutants")
        self.names = [item.nodeid for item, _ in passed]
        self.seconds = [facts["seconds"] for _, facts in passed]
        callers: dict[Place, list[int]] = defaultdict(list)
        for number, (_, facts) in enumerate(passed):
            for path, line in facts["called"]:
                callers[path, line].append(number)
        for mutant in self.mutants:
            numbers = callers[mutant.function]
            if not numbers:
                self.unreached.append(mutant)
                continue
            items = [passed[number][0] for number in numbers]
            patience_s = _PATIENCE * sum(self.seconds[number] for number in numbers) + _PATIENCE_S
            failed = _in_fork(lambda: self._failed(mutant, functions, items), patience_s)  # noqa: B023
            self.noticed[mutant] = frozenset({-1} if failed is None else (numbers[each] for each in failed))
        return True

    def _failed(
        self, mutant: Mutant, functions: Mapping[Place, list[FunctionType]], items: Sequence[pytest.Item]
    ) -> list[int]:
        for place, code in mutant.codes.items():
            for function in functions.get(place, ()):
                if len(function.__code__.co_freevars) != len(code.co_freevars):
                    return list(range(len(items)))
                function.__code__ = code
        found = []
        for number, item in enumerate(items):
            if _has_failed(item, items[number + 1] if number + 1 < len(items) else None):
                found.append(number)
                if self.stop_at_first:
                    break
        return found


def _has_failed(item: pytest.Item, following: pytest.Item | None) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=following))


def _traced(items: Sequence[pytest.Item], files: set[str]) -> list[dict[str, object]]:
    """For each test whether it failed, its seconds and the functions of `files` that it called."""
    called: set[Place] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    facts: list[dict[str, object]] = []
    for number, item in enumerate(items):
        called.clear()
        begin = time.monotonic()
        threading.setprofile(note)
        sys.setprofile(note)
        failed = _has_failed(item, items[number + 1] if number + 1 < len(items) else None)
        sys.setprofile(None)
        facts.append({"failed": failed, "seconds": time.monotonic() - begin, "called": sorted(called)})
    return facts


def _in_fork(work: Callable[[], object], patience_s: float) -> Any:
    """What `work` returns in a fork; None if the fork did not end in time, or not by itself."""
    with tempfile.TemporaryFile() as answer:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                answer.write(json.dumps(work()).encode())
                answer.flush()
                code = 0
            finally:
                os._exit(code)
        end = time.monotonic() + patience_s
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.005)
        if ended == (0, 0):
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        answer.seek(0)
        text = answer.read()
        return json.loads(text) if text else None


def _smallest(noticed: Mapping[Mutant, frozenset[str]], seconds: Mapping[str, float]) -> list[str]:
    """Tests that notice together what all notice: always the one next that notices the most, then the quickest."""
    left = {mutant for mutant, names in noticed.items() if names}
    chosen = []
    while left:
        counts: dict[str, int] = defaultdict(int)
        for mutant in left:
            for name in noticed[mutant]:
                counts[name] += 1
        best = max(counts, key=lambda name: (counts[name], -seconds[name], name))
        chosen.append(best)
        left = {mutant for mutant in left if best not in noticed[mutant]}
    return chosen


def _print_table(trial: Trial, say: Callable[[str], None], *, by_case: bool) -> None:
    def name_of(number: int) -> str:
        return "(no end)" if number < 0 else trial.names[number] if by_case else trial.names[number].partition("[")[0]

    seconds: dict[str, float] = defaultdict(float)
    cases: dict[str, int] = defaultdict(int)
    for number, taken in enumerate(trial.seconds):
        seconds[name_of(number)] += taken
        cases[name_of(number)] += 1
    noticed = {mutant: frozenset(map(name_of, numbers)) for mutant, numbers in trial.noticed.items()}
    needed = _smallest(noticed, seconds)
    say("needed cases seconds noticed alone  test")
    for name in sorted(cases):
        of_it = [names for names in noticed.values() if name in names]
        alone = sum(len(names) == 1 for names in of_it)
        mark = "yes" if name in needed else "no"
        say(f"{mark:6} {cases[name]:5} {seconds[name]:7.2f} {len(of_it):7} {alone:5}  {name}")


def main(words: Sequence[str] | None = None) -> int:
    """The exit code; the table is on stdout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("source", nargs="+", help="files, or directories with all their files")
    parser.add_argument("--tests", nargs="+", required=True)
    parser.add_argument("--sample", type=int, default=0, help="so many mutants at most, chosen at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-x", action="store_true", help="a mutant's tests end with the first that fails: no table")
    parser.add_argument("--cases", action="store_true", help="a line for each case of a test's table")
    asked = parser.parse_args(words)
    files = sorted(
        str(file.resolve())
        for source in map(Path, asked.source)
        for file in (source.rglob("*.py") if source.is_dir() else (source,))
    )
    places = [(file, number) for file in files for number in range(count_mutants(file))]
    if asked.sample and len(places) > asked.sample:
        places = random.Random(asked.seed).sample(places, asked.sample)
    mutants = [
        mutant
        for file in files
        for mutant in mutants_of(file, {number for of_file, number in places if of_file == file})
    ]
    out = os.fdopen(os.dup(1), "w")

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    trial = Trial(mutants, say, stop_at_first=asked.x)
    options = ["-q", "-o", "cache_dir=.build/pytest/mutants", "--hypothesis-profile", "quick", "--hypothesis-seed=1"]
    code = pytest.main([*options, *asked.tests], plugins=[trial])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(code)
    for mutant, failed in trial.noticed.items():
        if not failed:
            say(f"survived  {mutant}")
    for mutant in trial.unreached:
        say(f"unreached {mutant}")
    if not asked.x:
        _print_table(trial, say, by_case=asked.cases)
    killed = sum(map(bool, trial.noticed.values()))
    say(f"{killed} of {len(mutants)} mutants noticed; {len(trial.unreached)} are in functions that no test calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
