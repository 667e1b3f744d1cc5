"""Wheels of this checkout, for tests of what is installed."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path, environ: Mapping[str, str] | None = None) -> Path:
    """In `folder`, which has no other; `environ` beside what this process has. Raises RuntimeError with what the build
    printed."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | (environ or {}), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    [path] = folder.glob("*.whl")
    return path
