"""Regenerates protocol/v1 from proto/. With --check, only compares and exits 1 on a difference."""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
GENERATED = ROOT / "protocol" / "v1"


def generate(into: Path) -> None:
    """Writes the generated modules and their stubs below the folder `into`."""
    sources = sorted(str(path) for path in PROTO.rglob("*.proto"))
    plugins = [
        f"{Path(sys.executable).parent / name}"
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    arguments = [
        "protoc",
        f"--proto_path={PROTO}",
        f"--plugin=protoc-gen-mypy={plugins[0]}",
        f"--plugin=protoc-gen-mypy_grpc={plugins[1]}",
        f"--python_out={into}",
        f"--mypy_out={into}",
        f"--grpc_python_out={into}",
        f"--mypy_grpc_out={into}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed: see its message above")


def main() -> None:
    """Regenerates, or with --check compares."""
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {p.name: p.read_bytes() for p in (Path(scratch) / "protocol" / "v1").iterdir()}
    kept = {p.name: p.read_bytes() for p in GENERATED.glob("*_pb2*.py*")}
    if differing := sorted(n for n in fresh.keys() | kept.keys() if fresh.get(n) != kept.get(n)):
        sys.exit(
            f"protocol/v1 is not what proto/ says: {', '.join(differing)}; run 'make generate'"
        )


if __name__ == "__main__":
    main()
