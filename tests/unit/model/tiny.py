"""A random Llama of two layers, as Hugging Face transformers makes and runs it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.model.architecture import ModelConfig
from weir.model.files.config import load_model_config
from weir.model.files.source import ModelSource, resolve_model
from weir.model.torch.batch import build_batch
from weir.model.torch.decoder import Decoder
from weir.model.torch.paged_kv import PagedKv
from weir.model.torch.weights import load_weights

VOCAB_SIZE = 160
GREEDY = SampleSpec(SamplingParams(temperature=0.0), 0)


@dataclass(frozen=True)
class TinyLlama:
    """The folder holds `model`, of any architecture."""

    folder: Path
    model: transformers.PreTrainedModel

    @property
    def source(self) -> ModelSource:
        return resolve_model(str(self.folder))

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """By transformers: [tokens, vocabulary]."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([token_ids])).logits[0]
            assert isinstance(logits, torch.Tensor)
            return logits


def save_tiny_llama(folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> TinyLlama:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    # loaded again, because `to(dtype)` has rounded the rotary frequencies too
    return TinyLlama(folder, transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def poisoned_pages(num_pages: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Every value is NaN: whatever reads a place that was never written shows."""
    return np.full((num_pages, page_bytes), 0xFF, dtype=np.uint8)


def prompt_ids(length: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()
    return ids


class LogitsProbe:
    """Runs plans through the decoder and hands out the logits that a runner would sample from."""

    def __init__(self, source: ModelSource, num_pages: int = 64, max_context_tokens: int = 0) -> None:
        self.config: ModelConfig = load_model_config(source, max_context_tokens)
        self._decoder = Decoder(self.config, load_weights(source, self.config))
        self.pages = poisoned_pages(num_pages, self.config.page_geometry.page_bytes)
        self._kv = PagedKv(self.config.page_geometry, self.pages)

    def run(self, *chunks: ChunkPlan) -> dict[int, torch.Tensor]:
        """Logits [vocabulary] of each chunk that samples, by slot."""
        plan = StepPlan(0, chunks)
        with torch.inference_mode():
            batch = build_batch(plan, self._kv, self.config)
            hidden = self._decoder.forward(batch, self._kv)
            logits = self._decoder.logits(hidden)
        return {sampled.slot: logits[sampled.row] for sampled in batch.sampled}

    def run_alone(self, only: ChunkPlan) -> torch.Tensor:
        """Logits of every position of one chunk: [tokens, vocabulary]."""
        with torch.inference_mode():
            batch = build_batch(StepPlan(0, (only,)), self._kv, self.config)
            return self._decoder.logits(self._decoder.forward(batch, self._kv))


def chunk(slot: int, ids: list[int], start: int, end: int, table: tuple[int, ...]) -> ChunkPlan:
    """Positions [start, end) of `ids`, with its logits."""
    return ChunkPlan(slot, start, tuple(ids[start:end]), table, GREEDY)
