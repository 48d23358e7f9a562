"""What others wrote is decoded in one module: it knows every way in which JSON and TOML can be wrong."""

import ast
from collections.abc import Iterator
from pathlib import Path

from .project_files import ROOT

READER = "pyshim/model/decoding.py"
LIBRARIES = ("pyshim/cdi/", "pyshim/ttrpc/", "pyshim/start/stdlib.py")
"""They import nothing of the model."""
DECODERS = {
    "json": {"load", "loads", "JSONDecoder"},
    "tomllib": {"load", "loads"},
    "msgspec": {"convert"},
    "msgspec.json": {"decode", "Decoder"},
    "msgspec.toml": {"decode"},
    "msgspec.yaml": {"decode"},
    "yaml": {"load", "load_all", "safe_load", "safe_load_all"},
    "pickle": {"load", "loads"},
    "marshal": {"load", "loads"},
}
BY_THEMSELVES = {
    ("pyshim/agent/translate.py", "msgspec.convert"): "from protobuf messages, which are decoded",
    ("pyshim/config/sources.py", "tomllib.loads"): "single statements of a text that has been parsed, for their lines",
    ("pyshim/host/python_child.py", "json.loads"): "messages between a shim and its child",
    ("pyshim/node/kubernetes/manifest.py", "yaml.load_all"): "YAML, with the errors of PyYAML",
    ("pyshim/node/nri/description.py", "yaml.safe_load"): "YAML, with the errors of PyYAML",
    ("pyshim/node/nri/policy.py", "msgspec.convert"): "an object of a policy in Python, whatever it raises",
    ("pyshim/resources/devices/host/child.py", "msgspec.convert"): "the question of the shim to its child",
    ("pyshim/node/webhook/review.py", "msgspec.json.decode"): "names the members that json_value reads",
    ("pyshim/tracing/child.py", "json.loads"): "spans of the shim to its child",
    ("pyshim/tracing/child.py", "msgspec.json.decode"): "settings of the shim for its child",
    ("pyshim/tracing/exporter.py", "json.loads"): "reports of the child to its shim",
}
"""The calls that decode elsewhere, each with its reason."""


def test_only_one_module_decodes_what_others_wrote() -> None:
    found = {(path, call) for path in _files() for call in _decoders_in(ROOT / path)}

    assert sorted(found - BY_THEMSELVES.keys()) == [], "use from_json, from_toml, json_value or toml_value"
    assert sorted(BY_THEMSELVES.keys() - found) == [], "a reason without its call"


def test_a_decoder_is_found_under_any_name(tmp_path: Path) -> None:
    program = "import json as j\nfrom tomllib import loads as parse\nimport msgspec\n"
    (tmp_path / "a.py").write_text(program + "j.load(f)\nparse(t)\nmsgspec.json.decode(b)\nj.dumps(1)\n")

    assert list(_decoders_in(tmp_path / "a.py")) == ["json.load", "tomllib.loads", "msgspec.json.decode"]


def _files() -> Iterator[str]:
    for room in ("pyshim", "hypervisors"):
        for file in sorted((ROOT / room).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            if path != READER and not path.startswith(LIBRARIES):
                yield path


def _decoders_in(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call | ast.Attribute):
            text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
            first, dot, rest = text.partition(".")
            module, _, function = f"{names.get(first, first)}{dot}{rest}".rpartition(".")
            if isinstance(node, ast.Call) and function in DECODERS.get(module, ()):
                yield f"{module}.{function}"
