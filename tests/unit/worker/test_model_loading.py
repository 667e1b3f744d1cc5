"""A model is loaded beside other work, on the threads that the worker was given or its share of the cores."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tokenizers

from weir.model.cpu.core_share import FixedShare
from weir.worker.config import WorkerConfig
from weir.worker.engine.core_budget import CoreBudget
from weir.worker.engine.model_loading import core_share_of, load_grammar_engine, read_model_spec, start_in_thread


def test_int8_workers_share_the_cores_of_the_machine_whatever_their_instance(tmp_path: Path) -> None:
    first, second = (
        core_share_of(WorkerConfig(runtime_dir=tmp_path / "run", instance=name), "int8") for name in ("a", "b")
    )
    assert isinstance(first, CoreBudget)
    first.begin()
    assert second.begin() == max(1, len(os.sched_getaffinity(0)) // 2)


def test_a_number_of_threads_that_was_set_is_kept(tmp_path: Path) -> None:
    share = core_share_of(WorkerConfig(runtime_dir=tmp_path, num_threads=3), "int8")
    assert isinstance(share, FixedShare)
    assert share.most == 3


def test_pytorch_gets_an_equal_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert core_share_of(WorkerConfig(workers_on_machine=3), "fp32").most == 2
    assert core_share_of(WorkerConfig(workers_on_machine=20), "fp32").most == 1


def test_without_a_budget_file_a_worker_takes_an_equal_part_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cores").mkdir()
    with caplog.at_level(logging.WARNING):
        share = core_share_of(WorkerConfig(runtime_dir=tmp_path, workers_on_machine=2), "int8")
    assert share.most == 4
    assert "no common budget of cores" in caplog.text


def test_pages_that_a_worker_computes_exactly_have_a_digest_of_their_own() -> None:
    plain, exact = (
        read_model_spec(WorkerConfig(load="dummy", model_shape="tiny", device="interpreter", exact=exact))
        for exact in (False, True)
    )
    assert plain.digest != exact.digest
    assert plain.page_bytes == exact.page_bytes


@pytest.mark.parametrize(
    ("device", "precision", "imports"),
    [
        ("interpreter", "fp32", ["import torch", "import triton"]),
        ("cpu", "fp32", ["import torch", "import numba"]),
        ("cpu", "int8", ["import numba"]),
    ],
)
def test_a_worker_has_imported_its_libraries_before_it_has_a_lease_to_keep(
    device: str, precision: str, imports: list[str]
) -> None:
    """And not scipy's linear algebra, which numba would import where it is installed."""
    if device == "interpreter":
        pytest.importorskip("triton", reason="Triton is installed on Linux only")
    child = subprocess.run(
        [sys.executable, "-m", "tests.unit.worker.attach_order", device, precision, "dummy:tiny"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert child.stdout.splitlines() == [*imports, "attach"], child.stderr[-2000:]


def test_a_vocabulary_is_read_once_until_its_files_are_others(tmp_path: Path) -> None:
    sizes = {"vocab_size": 3, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 64}
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(kind | sizes | shape))
    (tmp_path / "model.safetensors").touch()
    path, config = tmp_path / "tokenizer.json", WorkerConfig(model=str(tmp_path))
    engines = []
    for token in ("a", "bc"):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={token: 0}, merges=[]))
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.save(str(path))
        engines.append(load_grammar_engine(config))
        assert load_grammar_engine(config) is engines[-1]
    assert engines[0] is not engines[1]


def test_nothing_that_is_prepared_for_forks_has_started_a_thread() -> None:
    """Of which a fork would have no more than the locks that it held; but for those of numpy's BLAS, which know it."""
    code = (
        "import os; from weir.worker.roles.kinds import prepare_workers; "
        "prepare_workers('decode', ['--model', 'smollm2-135m'], {}); print(len(os.listdir('/proc/self/task')))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert child.stdout == "1\n", child.stderr[-2000:]


def test_work_runs_before_its_result_is_asked_for() -> None:
    has_run = threading.Event()

    def work() -> int:
        has_run.set()
        return 7

    future = start_in_thread(work, "seven")
    assert has_run.wait(5)
    assert future.result(5) == 7


def test_an_error_reaches_whoever_asks_for_the_result() -> None:
    def fail() -> int:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        start_in_thread(fail, "failing").result(5)
