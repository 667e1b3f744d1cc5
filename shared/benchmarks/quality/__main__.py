"""Perplexity, divergence and greedy agreement of each format, beside fp32, on a text: `python -m benchmarks.quality
TEXT [--key-outliers 16]`."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.quality.formats import FORMATS, Format, log_probabilities, rounded_weights, with_key_outliers
from weir.bench.quality import WINDOW_TOKENS
from weir.model.files.config import load_model_config
from weir.model.files.source import resolve_model
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.torch.key_balance import balance_keys
from weir.model.torch.weights import load_weights


@dataclass
class Sums:
    """Over the positions of all windows."""

    positions: int = 0
    nll: float = 0.0
    divergence: float = 0.0
    same_top: int = 0

    def add(self, found: torch.Tensor, exact: torch.Tensor, next_ids: torch.Tensor) -> None:
        """`found`, `exact`: log-probabilities [positions, vocabulary]."""
        self.positions += len(next_ids)
        self.nll -= float(found.gather(1, next_ids[:, None]).double().sum())
        self.divergence += float((exact.exp() * (exact - found)).double().sum())
        self.same_top += int((found.argmax(-1) == exact.argmax(-1)).sum())

    def row(self, name: str, baseline: "Sums") -> str:
        perplexity = math.exp(self.nll / self.positions)
        change = perplexity / math.exp(baseline.nll / baseline.positions) - 1
        mean = self.divergence / self.positions
        return f"| {name} | {perplexity:.4f} | {change:+.3%} | {mean:.6f} | {self.same_top / self.positions:.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--key-outliers", type=float, default=1.0, help="factor of one pair of channels of every key")
    parser.add_argument("--balance-keys", action="store_true", help="as for pages of int8")
    parser.add_argument("--only", default="", help="formats whose name has this in it")
    asked = parser.parse_args()
    source = resolve_model(asked.model)
    config = load_model_config(source)
    token_ids = torch.tensor(load_tokenizer(source).encode(asked.text.read_text())[: asked.max_tokens])
    weights = with_key_outliers(load_weights(source, config), config, asked.key_outliers)
    if asked.balance_keys:
        balance_keys(weights, config)
    formats = {name: used for name, used in FORMATS.items() if asked.only in name}
    rounded = {used.weights: rounded_weights(weights, used.weights) for used in formats.values()}
    sums = {name: Sums() for name in ("fp32", *formats)}
    with torch.inference_mode():
        for start in range(0, len(token_ids) - 1, WINDOW_TOKENS):
            window = token_ids[start : start + WINDOW_TOKENS]
            exact = log_probabilities(config, weights, window, Format())[:-1]
            sums["fp32"].add(exact, exact, window[1:])
            for name, used in formats.items():
                found = log_probabilities(config, rounded[used.weights], window, used)[:-1]
                sums[name].add(found, exact, window[1:])
    print(f"{source.name}, {len(token_ids)} tokens in windows of {WINDOW_TOKENS}, key outliers x{asked.key_outliers:g}")
    print("| format | perplexity | beside fp32 | mean KL, nats | same most likely token |\n|---|---|---|---|---|")
    for name, found_sums in sums.items():
        print(found_sums.row(name, sums["fp32"]))


if __name__ == "__main__":
    main()
