"""A model's tensors by name, wherever they lie. numpy only: not every worker computes with torch."""

from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.errors import ModelError
from weir.model.files.arranged import ArrangedTensors
from weir.model.files.dummy import DummyTensors
from weir.model.files.quantization import folder_scheme
from weir.model.files.quantized_folder import QuantizedFolder
from weir.model.files.safetensors import SafetensorsFolder
from weir.model.files.source import ModelKind, ModelSource
from weir.model.files.tensor_file import TensorFile


def open_tensors(source: ModelSource, config: ModelConfig) -> TensorFile:
    """The tensors of `config` and no others; nothing is read yet but headers.

    Raises:
        ModelError: names every tensor that is missing, unknown or of another shape than `config` asks for.
    """
    tensors = _open(source, config)
    _check_shapes(source, tensors.shapes(), tensor_shapes(config), config.tie_word_embeddings)
    return tensors


def _open(source: ModelSource, config: ModelConfig) -> TensorFile:
    if source.kind is ModelKind.GGUF:
        # here and not above: a machine without GGUF files need not have their library
        from weir.model.files.gguf_tensors import GgufTensors  # noqa: PLC0415

        # converters write norms as they are multiplied with
        return ArrangedTensors(GgufTensors(source.path, config), config, has_offset_norms=False)
    if source.kind is ModelKind.DUMMY:
        return DummyTensors(config)
    scheme = folder_scheme(source.path)
    if scheme is None:
        file: TensorFile = SafetensorsFolder(source.path)
    else:
        file = QuantizedFolder(source.path, scheme, tensor_shapes(config))
    return ArrangedTensors(file, config, has_offset_norms=config.offset_norms)


def _check_shapes(
    source: ModelSource, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], tied: bool
) -> None:
    # buffers that old checkpoints saved, and the second name of a tied matrix
    found = {
        name: shape
        for name, shape in found.items()
        if not name.endswith(".rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [
        f"{name} is not part of a model of its architecture" for name in sorted(found.keys() - expected.keys())
    ]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in sorted(found.keys() & expected.keys())
        if found[name] != expected[name]
    ]
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ModelError(f"{source.path}: {'; '.join(problems[:10])}{more}")
