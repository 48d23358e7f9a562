#!/usr/bin/env python3
"""Regenerate the modules of this directory and of pyshim/ttrpc from their `.proto` files.

`generate.py` writes `*_pb2.py` and `*_pb2.pyi` beside each `.proto`, and `*_pb2_grpc.py` for the services that are
called over gRPC, and removes generated modules whose `.proto` is gone. `generate.py --check` changes nothing: it
generates into a temporary directory, names every module that is stale, missing or left over, and exits 1 if there is
one. The output depends on nothing but the `.proto` files and the version of grpcio-tools, which is locked in
requirements-dev.lock.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = (HERE, HERE.parent / "pyshim" / "ttrpc")
"""The second is a library of its own: it has its messages beside it."""
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
# All other services travel over ttrpc, whose client and server need no generated stubs.
OVER_GRPC = (
    "protos/cri/v1.proto",
    *(f"protos/kubelet/{name}_v1.proto" for name in ("dra", "pluginregistration", "podresources")),
)


def proto_files(source: Path) -> tuple[str, ...]:
    """Import paths (`protos/...`) of all `.proto` files under `source`, sorted."""
    return tuple(sorted(path.relative_to(source.parent).as_posix() for path in source.rglob("*.proto")))


def generated_files(directory: Path) -> dict[str, bytes]:
    """Contents of the generated modules under `directory`, by path relative to it."""
    paths = (path for pattern in GENERATED for path in directory.rglob(pattern))
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(paths)}


def generate(source: Path, destination: Path) -> None:
    """`destination` has freshly generated modules for every `.proto` of `source`, in a directory of the same name.

    Raises SystemExit when protoc refuses a file (it has then printed why) or grpcio-tools is not installed.
    """
    try:
        import grpc_tools
        from grpc_tools import protoc
    except ImportError as exc:
        raise SystemExit(f"generate modules: {exc} (hint: install the development dependencies)") from exc
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    names = proto_files(source)
    include = ["protoc", f"-I{source.parent}", f"-I{well_known}"]
    messages = [*include, f"--python_out={destination}", f"--pyi_out={destination}", *names]
    stubs = [*include, f"--grpc_python_out={destination}", *(name for name in names if name in OVER_GRPC)]
    for arguments in (messages, stubs):
        if arguments[-1].endswith(".proto") and protoc.main(arguments) != 0:
            raise SystemExit("generate modules: protoc failed")


def differences(current: dict[str, bytes], fresh: dict[str, bytes]) -> tuple[tuple[str, str], ...]:
    """(`missing`, `left over` or `stale`, name) of every module in which `current` differs from `fresh`, by name."""
    found = []
    for name in sorted(current.keys() | fresh.keys()):
        if name not in current:
            found.append(("missing", name))
        elif name not in fresh:
            found.append(("left over", name))
        elif current[name] != fresh[name]:
            found.append(("stale", name))
    return tuple(found)


def main(argv: list[str], sources: tuple[Path, ...] = SOURCES) -> int:
    """Modules under `sources` are current, with `--check` only if this returns 0; the changes have been printed."""
    parser = argparse.ArgumentParser(description="Regenerate the protobuf modules from the .proto files.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and name what is not current")
    arguments = parser.parse_args(argv)
    return max(_refresh(source, only_check=arguments.check) for source in sources)


def _refresh(source: Path, *, only_check: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="pyshim-protos-") as scratch:
        generate(source, Path(scratch))
        fresh = generated_files(Path(scratch) / source.name)
    found = differences(generated_files(source), fresh)
    for kind, name in found:
        print(f"{kind}: {name}", file=sys.stderr if only_check else sys.stdout)
    if only_check:
        if found:
            print("hint: run protos/generate.py with the locked grpcio-tools and commit the result", file=sys.stderr)
        return 1 if found else 0
    for kind, name in found:
        if kind == "left over":
            (source / name).unlink()
        else:
            (source / name).write_bytes(fresh[name])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
