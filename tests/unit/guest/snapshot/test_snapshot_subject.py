"""What the kept process has: all that a call imports when it runs, but for the rare."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from guest.snapshot.subject import CAUGHT_SIGNALS, IGNORED_SIGNALS, LATER, LAZY, kept_modules

CHECKOUT = Path(__file__).resolve().parents[4]
LOAD = """
import json, sys
sys.path.insert(0, sys.argv[1])
for name in json.loads(sys.argv[2]): __import__(name)
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([list(sys.modules), *(int(lines[key], 16) for key in ("SigIgn", "SigCgt", "SigBlk"))]))
"""


def agent_files() -> dict[str, Path]:
    files = sorted((CHECKOUT / "guest/agent").rglob("*.py"))
    return {str(file.relative_to(CHECKOUT).with_suffix("")).replace("/", "."): file for file in files}


def imported_in_functions(file: Path) -> set[str]:
    names: set[str] = set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds))
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def loaded(modules: list[str]) -> tuple[set[str], list[int]]:
    """All modules of an interpreter that has imported `modules`; its signals ignored, caught and blocked, as masks."""
    # as process 1 has them at its start, whatever this test was started by ignores; 32 and 33 nobody can set (nptl(7))
    argv = ["env", "--default-signal", sys.executable, "-I", "-S", "-c", LOAD, str(CHECKOUT), json.dumps(modules)]
    names, *masks = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    return set(names), [mask & ~(0b11 << 31) for mask in masks]


def test_the_signals_set_again_are_all_that_the_interpreter_and_the_kept_modules_had_set() -> None:
    kept = kept_modules(name for name in agent_files() if not name.endswith("__init__"))

    _, masks = loaded([*kept, *LAZY])

    assert masks == [sum(1 << number - 1 for number in numbers) for numbers in (IGNORED_SIGNALS, CAUGHT_SIGNALS, ())]


def test_a_call_imports_only_what_is_there_or_rare() -> None:
    files = agent_files()
    kept = kept_modules(name for name in files if not name.endswith("__init__"))
    names, _ = loaded([*kept, *LAZY])

    wanted = {name for module in kept for name in imported_in_functions(files[module])}

    assert {name for name in wanted - names if not name.startswith(LATER)} == set()
    assert {"fcntl", "guest.agent.container.cdi"} <= wanted, "the test sees what is imported in functions"
    assert "dataclasses" not in names
    # What has drawn random numbers by then would have drawn the same in every guest.
    assert not {"ssl", "_ssl", "random", "secrets", "tempfile", "uuid"} & names
