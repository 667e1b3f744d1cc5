"""What is got ready before a model is on its device, and what a machine may lack."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux only")

import torch

from weir.model.errors import ModelError
from weir.model.triton.load import start_device

_WARM_UP = """
from weir.kv.memory.device import HostMemory
from weir.kv.geometry import ArenaGeometry
from weir.model.precision import page_geometry
from weir.model.files.source import resolve_model
from weir.model.triton.load import load_on_device

weights = load_on_device(resolve_model("dummy:tiny"), "fp32", "interpreter", num_threads=1)
page_bytes = page_geometry(weights.config, weights.arithmetic).page_bytes
geometry = ArenaGeometry(page_bytes, 12, num_slots=4, max_context_tokens=128, pages_on_device=True)
memory = HostMemory.create(geometry.page_memory_bytes)
weights.runner_over(memory, geometry, max_rows=64, max_sequences=4).warm_up()
"""


def test_a_gpu_is_in_use_once_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append("cuda"))
    start_device("cuda", num_threads=1)
    assert started == ["cuda"]


def test_a_gpu_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"device cuda: PyTorch .* finds no GPU; use --device cpu"):
        start_device("cuda", num_threads=1)


def test_a_numba_that_cannot_be_imported_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba/__init__.py").write_text("raise ImportError('Numba needs NumPy 2.4 or less')\n")
    code = f"import sys\nsys.path[:0] = {[str(tmp_path), *sys.path]!r}\n{_WARM_UP}"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
