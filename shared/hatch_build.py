"""A wheel whose scheduling core is compiled by mypyc, if HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 asks for it (ADR 0104).

`weir.scheduling` is annotated throughout and calls nothing but Python, so a compiler that trusts annotations makes it
nearly twice as fast. It is compiled in a copy: a checkout gets no compiled file, which would hide its source.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = "weir/scheduling"
_NOT_COMPILED = ("__init__.py", "limits.py", "limits_file.py", "worker_limits.py")
"""Limits are read seldom, by their annotations at run time, which compiled classes do not keep as they are; and where
one says float a whole number would become one, so that who wrote 1 would read of 1.0."""


class CompiledScheduling(BuildHookInterface[Any]):
    """Adds the compiled modules beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises RuntimeError: the install is editable; or with what mypyc or the C compiler printed."""
        if version == "editable":
            raise RuntimeError("HATCH_BUILD_HOOK_ENABLE_CUSTOM: an editable install is its sources; leave out -e")
        self._folder = TemporaryDirectory(prefix="weir-compiled-")
        copy = Path(self._folder.name)
        source = Path(self.root) / "shared" / "weir"
        shutil.copytree(source, copy / "weir", ignore=shutil.ignore_patterns("__pycache__"))
        files = [path for path in sorted((copy / _PACKAGE).rglob("*.py")) if path.name not in _NOT_COMPILED]
        # Not what it imports: dependencies are not there where a wheel is built.
        mypyc = [sys.executable, "-m", "mypyc", "--ignore-missing-imports", "--follow-imports=silent"]
        mypyc += [str(path.relative_to(copy)) for path in files]
        done = subprocess.run(mypyc, cwd=copy, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(mypyc)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        shutil.rmtree(copy / "build")
        build_data["force_include"] |= {str(path): str(path.relative_to(copy)) for path in copy.rglob("*.so")}
        build_data |= {"pure_python": False, "infer_tag": True}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()
