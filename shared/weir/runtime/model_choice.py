"""Which model a process serves: by name or path, or random weights of a known shape."""

from typing import Literal

from weir.model.files.source import DUMMY_PREFIX

Load = Literal["files", "dummy"]

MODEL_HELP = "Model: a known name, a GGUF file or a Hugging Face folder."
LOAD_HELP = "Where weights come from: the model's files, or nowhere (dummy: seeded random numbers, for speed tests)."
MODEL_SHAPE_HELP = "Shape of dummy weights, such as llama-3.1-8b; the setting model is not looked at then."


def check_load(load: Load, model_shape: str) -> None:
    """Raises ValueError: a shape and dummy weights go together."""
    if load == "dummy" and not model_shape:
        raise ValueError("load 'dummy': needs a model_shape, such as llama-3.1-8b")
    if load == "files" and model_shape:
        raise ValueError(f"model_shape {model_shape!r}: is for load 'dummy' only")


def model_reference(model: str, load: Load, model_shape: str) -> str:
    """What `weir.model.files.source.resolve_model` takes."""
    return f"{DUMMY_PREFIX}{model_shape}" if load == "dummy" else model
