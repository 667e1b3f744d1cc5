"""Generates `weir.wire.v1` from `proto/weir/v1`: `python proto/generate.py`, or `make proto`.

protoc writes imports after the proto path (`weir.v1`), and has no option to place the modules in another package; so
each generated import of `weir.v1` is rewritten to `weir.wire.v1`.
"""

import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

import weir.wire

PROTO_ROOT = Path(__file__).resolve().parent
GENERATED_ROOT = Path(weir.wire.__file__).parent / "v1"
_PROTO_PACKAGE = re.compile(r"\bweir\.v1(?= import| as|\.\w+_pb2)|\bweir\.v1$", re.MULTILINE)


def generate(output_dir: Path) -> None:
    """Writes the generated modules into `output_dir`, replacing what is there. Raises RuntimeError if protoc fails."""
    well_known = Path(sysconfig.get_paths()["purelib"]) / "grpc_tools" / "_proto"
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.glob("weir/v1/*.proto"))
    scripts_dir = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as staging:
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={PROTO_ROOT}",
                f"--proto_path={well_known}",
                f"--plugin=protoc-gen-mypy={scripts_dir / 'protoc-gen-mypy'}",
                f"--plugin=protoc-gen-mypy_grpc={scripts_dir / 'protoc-gen-mypy_grpc'}",
                f"--python_out={staging}",
                f"--grpc_python_out={staging}",
                f"--mypy_out=quiet:{staging}",
                f"--mypy_grpc_out=quiet:{staging}",
                *protos,
            ]
        )
        if status != 0:
            raise RuntimeError(f"protoc ended with status {status} for {', '.join(protos)}")
        shutil.rmtree(output_dir, ignore_errors=True)
        output_dir.mkdir(parents=True)
        (output_dir / "__init__.py").write_text("")
        for source in sorted((Path(staging) / "weir" / "v1").iterdir()):
            (output_dir / source.name).write_text(_PROTO_PACKAGE.sub("weir.wire.v1", source.read_text()))


if __name__ == "__main__":
    generate(GENERATED_ROOT)
