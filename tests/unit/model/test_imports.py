"""Who reads a model's files needs no torch, and who needs no files needs none of the libraries that read them."""

import subprocess
import sys
from pathlib import Path

import weir.model

MODEL_ROOM = Path(weir.model.__file__).parent
# what reads files; the runners are no part of this
TORCH_FREE = [
    f"weir.model.{name}" for name in ("architecture", "cpu.core_share", "device_check", "errors", "load", "precision")
] + sorted(
    f"weir.model.{room}.{path.stem}" for room in ("files", "tokens") for path in (MODEL_ROOM / room).glob("[!_]*.py")
)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], check=False, timeout=300, capture_output=True, text=True)


def test_reading_models_never_imports_torch_or_a_compiler() -> None:
    assert {"weir.model.files.config", "weir.model.tokens.tokenizer"} <= set(TORCH_FREE)
    done = run_python(
        f"import sys, {', '.join(TORCH_FREE)}; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr


def test_dummies_run_on_a_machine_without_the_libraries_that_files_need() -> None:
    done = run_python(
        "import sys\n"
        "for name in ('gguf', 'jinja2', 'xxhash', 'nats', 'opentelemetry', 'numba'):\n"
        "    sys.modules[name] = None\n"
        "from weir.model.files.config import load_model_config\n"
        "from weir.model.torch.weights import dummy_weights_on\n"
        "from weir.model.files.source import resolve_model\n"
        "from weir.model.tokens.tokenizer import load_tokenizer\n"
        "from weir.model.torch.weights import load_weights\n"
        "source = resolve_model('dummy:tiny')\n"
        "config = load_model_config(source)\n"
        "print(len(load_weights(source, config).layers), load_tokenizer(source).encode('ab'))\n"
    )
    assert done.stdout.split("\n")[0] == "2 [97, 98]", done.stderr
