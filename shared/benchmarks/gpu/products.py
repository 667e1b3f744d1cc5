"""Matrix products of a decode step: the library's beside what reading its weights takes, exact ones beside those."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.output import Record
from benchmarks.gpu.timer import Ceilings, Timer
from weir.model.architecture import ModelConfig
from weir.ops.gpu.exact_linear import exact_linear

_BF16_BYTES = 2


def product_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of each matrix that a step multiplies by, as the decoder stacks them."""
    heads_width = config.num_heads * config.head_dim
    return {
        "query_key_value": (heads_width + 2 * config.num_kv_heads * config.head_dim, config.hidden_size),
        "attention_output": (config.hidden_size, heads_width),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }


def time_products(
    config: ModelConfig, num_rows: int, timer: Timer, ceilings: Ceilings, device: torch.device
) -> Iterator[Record]:
    """One record a matrix, and their sum over a step's layers."""
    step_us = floor_us = 0.0
    for name, (num_out, num_in) in product_shapes(config).items():
        rows, matrix, out = _operands(num_rows, num_out, num_in, device)
        timing = timer.time(partial(torch.mm, rows, matrix.t(), out=out))
        num_bytes = _BF16_BYTES * (matrix.numel() + rows.numel() + out.numel())
        own_floor_us = ceilings.floor_us(num_bytes, 2 * num_rows * matrix.numel())
        count = 1 if name == "head" else config.num_layers
        step_us, floor_us = step_us + count * timing.median_us, floor_us + count * own_floor_us
        yield {
            "product": f"{name} {num_out} x {num_in}",
            "rows": num_rows,
            "median_us": timing.median_us,
            "gb_a_second": num_bytes / timing.median_us / 1e3,
            "times_floor": timing.median_us / own_floor_us,
        }
    yield {"rows": num_rows, "products_of_a_step_ms": step_us / 1e3, "times_floor": step_us / floor_us}


def time_exact_products(config: ModelConfig, num_rows: int, timer: Timer, device: torch.device) -> Iterator[Record]:
    """What `--exact` costs: one record a matrix, and their sum over a step's layers."""
    library_step_us = exact_step_us = 0.0
    for name, (num_out, num_in) in product_shapes(config).items():
        rows, matrix, out = _operands(num_rows, num_out, num_in, device)
        library_us = timer.time(partial(torch.mm, rows, matrix.t(), out=out)).median_us
        exact_us = timer.time(partial(exact_linear, rows, matrix, None, out)).median_us
        count = 1 if name == "head" else config.num_layers
        library_step_us, exact_step_us = library_step_us + count * library_us, exact_step_us + count * exact_us
        yield {
            "product": f"{name} {num_out} x {num_in}",
            "rows": num_rows,
            "library_us": library_us,
            "exact_us": exact_us,
            "exact_over_library": exact_us / library_us,
        }
    yield {
        "rows": num_rows,
        "exact_products_of_a_step_ms": exact_step_us / 1e3,
        "exact_over_library": exact_step_us / library_step_us,
    }


def _operands(
    num_rows: int, num_out: int, num_in: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, matrix, and room for their product."""
    rows = torch.randn(num_rows, num_in, device=device, dtype=torch.bfloat16)
    matrix = torch.randn(num_out, num_in, device=device, dtype=torch.bfloat16)
    return rows, matrix, torch.empty(num_rows, num_out, device=device, dtype=torch.bfloat16)
