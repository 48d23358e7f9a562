"""The interpreter's part of the image: what is compiled, bundled, imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from guest.image import recipe
from guest.image.errors import BuildError
from guest.image.interpreter import (
    AGENT_ROOT,
    STDLIB,
    agent_sources,
    bundle,
    compiled,
    library_sources,
    stdlib_sources,
    with_bundle,
)

CHECKOUT = Path(__file__).resolve().parents[4]
HOST_PYTHON = [sys.executable, "-I", "-S"]


# Beside the standard library.
LIBRARIES = set(recipe.PYTHON_LIBRARIES.values())


def agent_modules() -> dict[str, Path]:
    sources = agent_sources(CHECKOUT, recipe.AGENT_SOURCES)
    return {source.path.removeprefix(f"{AGENT_ROOT}/"): source.file for source in sources}


def imported_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def test_every_import_of_the_agent_is_in_the_image() -> None:
    modules = agent_modules()
    carried = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in modules}
    left_out = {name.removesuffix(".py").replace("/", ".") for name in recipe.STDLIB_WITHOUT}
    left_out |= {"_hashlib", "_ssl", "_sqlite3", "_bz2", "_decimal", "readline", "_curses", "_multiprocessing"}
    for path, file in modules.items():
        for name in imported_names(file):
            top = name.partition(".")[0]
            if top in ("guest", "pyshim", "protos", "google"):
                assert name in carried, f"{path} imports {name}, which the image does not carry"
            else:
                if top in LIBRARIES:
                    continue
                assert top in sys.stdlib_module_names, f"{path} imports {name}, which is not of the standard library"
                assert top not in left_out, f"{path} imports {name}, which the recipe leaves out"


def test_everything_the_agent_loads_before_its_first_answers_is_bundled() -> None:
    """Runs the agent's imports and looks which came from a file of the standard library."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules)\n"
        "import guest.agent.main as main, guest.agent.agent, guest.agent.transport, guest.agent.settings\n"
        "for name in main._PRELOAD: __import__(name)\n"
        "frozen = {name for name, m in sys.modules.items() if getattr(m.__spec__, 'origin', '') == 'frozen'}\n"
        "print(*(name for name in set(sys.modules) - before - frozen if getattr(sys.modules[name], '__file__', None)\n"
        "    and sys.modules[name].__file__.endswith('.py')))\n"
    )

    done = subprocess.run([*HOST_PYTHON, "-c", script, CHECKOUT], capture_output=True, text=True, check=True)

    loaded = {name for name in done.stdout.split() if name.partition(".")[0] not in ("guest", "pyshim")}
    assert loaded <= set(recipe.BUNDLED_STDLIB)


def test_a_librarys_modules_lie_beside_the_standard_librarys(tmp_path: Path) -> None:
    root = tmp_path / "usr/lib/python3/dist-packages/yaml"
    root.mkdir(parents=True)
    for name in ("__init__.py", "loader.py", "_yaml.cpython-311-x86_64-linux-gnu.so", "PKG-INFO"):
        (root / name).write_text("")

    assert [source.path for source in library_sources(tmp_path, "yaml")] == [
        f"{STDLIB}/yaml/__init__.py",
        f"{STDLIB}/yaml/loader.py",
    ]
    with pytest.raises(BuildError, match="take library toml: it is not in"):
        library_sources(tmp_path, "toml")


def test_agent_sources_are_modules_only_and_missing_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "one/__pycache__").mkdir(parents=True)
    for name in ("one/a.py", "one/a.pyi", "one/notes.md", "one/__pycache__/a.py", "one/a_pb2_grpc.py"):
        (tmp_path / name).write_text("")

    assert [source.path for source in agent_sources(tmp_path, ["one"])] == [f"{AGENT_ROOT}/one/a.py"]
    with pytest.raises(BuildError, match="take agent sources: two is not in"):
        agent_sources(tmp_path, ["two"])


def test_the_standard_library_comes_without_what_the_recipe_leaves_out(tmp_path: Path) -> None:
    root = tmp_path / STDLIB
    for name in ("os.py", "test/support.py", "json/decoder.py", "ctypes/test/test_x.py", "ctypes/util.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    extension = root / "lib-dynload/_json.cpython-311-x86_64-linux-gnu.so"
    extension.parent.mkdir()
    extension.write_bytes(b"")
    extension.with_name("_sqlite3.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")

    paths = {source.path.removeprefix(f"{STDLIB}/") for source in stdlib_sources([tmp_path])}

    assert paths == {"os.py", "json/decoder.py", "ctypes/util.py", f"lib-dynload/{extension.name}"}


def compiled_files(directory: Path, texts: dict[str, str]) -> dict[str, bytes]:
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    scratch = directory / "scratch"
    scratch.mkdir(exist_ok=True)
    sources = agent_sources(directory, sorted({name.partition("/")[0] for name in texts}))
    return compiled(sources, HOST_PYTHON, scratch)


def test_byte_code_depends_on_neither_place_nor_time(tmp_path: Path) -> None:
    texts = {"pack/__init__.py": "x = {'b', 'a', 'c'}\n", "pack/mod.py": "def f(): return __file__ in {'q', 'r'}\n"}
    one, two = tmp_path / "one", tmp_path / "two"

    assert compiled_files(one, texts) == compiled_files(two, texts)


def test_a_module_that_does_not_compile_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"pack/broken\.py"):
        compiled_files(tmp_path, {"pack/broken.py": "def f(:\n"})


def run_from_bundle(directory: Path, content: bytes, script: str) -> subprocess.CompletedProcess[str]:
    (directory / "bundle").write_bytes(content)
    prelude = (
        f"import sys; sys.path[:] = [p for p in sys.path if 'python' in p]\n"
        f"namespace = {{'__name__': 'start'}}\n"
        f"exec(open({str(CHECKOUT / 'guest/image/start.py')!r}).read(), namespace)\n"
        f"sys.meta_path.insert(0, namespace['Bundle']({str(directory / 'bundle')!r}))\n"
    )
    return subprocess.run([*HOST_PYTHON, "-c", prelude + script], capture_output=True, text=True, check=False)


def test_packages_and_modules_are_imported_from_the_bundle(tmp_path: Path) -> None:
    files = compiled_files(
        tmp_path,
        {
            "pack/__init__.py": "from pack.sub.leaf import value\n",
            "pack/sub/__init__.py": "",
            "pack/sub/leaf.py": "from __future__ import annotations\nfrom .. import sub\nvalue = sub.__name__\n",
            "pack/fails.py": "def f():\n    raise LookupError('from the bundle')\n",
        },
    )
    content = bundle((path.removeprefix(f"{AGENT_ROOT}/"), data) for path, data in files.items())

    done = run_from_bundle(
        tmp_path,
        content,
        "import pack, json, pack.fails\nprint(pack.value, pack.__path__, pack.sub.leaf.__package__)\n"
        "try: import pack.absent\nexcept ModuleNotFoundError as error: print(error)\npack.fails.f()\n",
    )

    assert done.stdout.splitlines() == ["pack.sub [] pack.sub", "No module named 'pack.absent'"]
    # a traceback still tells where in our sources
    assert f'File "/{AGENT_ROOT}/pack/fails.py", line 2, in f' in done.stderr


def test_the_entry_stays_a_file_and_bundled_library_modules_stay_importable_by_others() -> None:
    header = bytes(16)
    content = {
        f"{AGENT_ROOT}/start.pyc": header + b"entry",
        f"{AGENT_ROOT}/guest/__init__.pyc": header + b"guest",
        f"{STDLIB}/heapq.pyc": header + b"heapq",
        f"{STDLIB}/ctypes/__init__.pyc": header + b"ctypes",
    }

    placed = with_bundle(content, ["heapq", "ctypes"])

    assert set(placed) == set(content) - {f"{AGENT_ROOT}/guest/__init__.pyc"} | {f"{AGENT_ROOT}/bundle"}
    index = placed[f"{AGENT_ROOT}/bundle"].split(b"\n", 4)[1:4]
    assert index == [b"guest 1 0 5", b"heapq 0 5 5", b"ctypes 1 10 6"]


def test_a_bundled_module_that_is_not_there_is_named() -> None:
    with pytest.raises(BuildError, match="bundle module gone"):
        with_bundle({}, ["gone"])
