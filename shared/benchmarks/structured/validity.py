"""Whether what is held to a JSON schema is valid, over schemas by the hundred.

    python -m benchmarks.structured.validity
    python -m benchmarks.structured.validity --public nbformat-5.11.1-py3-none-any.whl JSON-Schema-Test-Suite/tests
    python -m benchmarks.structured.validity --skip-engine --served-schemas 20

First the engine alone, with random draws, over a toy's bytes and over the built-in model's tokens: what ends is valid,
and valid documents can be said. Then whole stacks, of a model with random weights and of the built-in one, whose
sequences are preempted and whose decode workers are killed. `--public` takes wheels and folders of schemas, of which
`pip download --no-deps` gets some (check-jsonschema, nbformat, openapi-spec-validator).
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.random_gguf import write_random_gguf
from benchmarks.structured.drawing import real_tokenizer, toy_vocabulary
from benchmarks.structured.engine_checks import EngineChecks
from benchmarks.structured.public import installed_schemas, schemas_of
from benchmarks.structured.schemas import schema_example
from benchmarks.structured.served import ModelToServe, serve_schemas
from weir.grammar.protocol import Vocabulary
from weir.model.files.dummy import shape_named
from weir.model.files.source import resolve_model
from weir.model.tokens.tokenizer import load_tokenizer

_TINY_ARENA_BYTES = 7_000_000
"""Little more than a stack of it starts with."""
_BUILT_IN_PAGE_BYTES = 30 * 2 * 3 * 16 * 64 * 2
_NUM_PAGES = 72
_OTHER_ARENA_BYTES = 4 << 20
_ENDING = '"}],'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=500, help="generated ones, for the engine")
    parser.add_argument("--public", type=Path, nargs="*", default=[], help="wheels and folders with schemas")
    parser.add_argument("--skip-engine", action="store_true")
    parser.add_argument("--served-schemas", type=int, default=250, help="by the model with random weights; 0: none")
    parser.add_argument("--built-in-schemas", type=int, default=25, help="by the built-in model; 0: none")
    parser.add_argument("--at-a-time", type=int, default=12)
    parser.add_argument("--kill-every-s", type=float, default=6.0)
    asked = parser.parse_args()
    if not asked.skip_engine:
        tokenizer, real = real_tokenizer()
        del tokenizer
        for name, vocabulary in (("a toy of bytes", toy_vocabulary()), ("smollm2-135m", real)):
            _check_engine(name, vocabulary, asked.schemas, asked.public)
    with tempfile.TemporaryDirectory() as folder:
        if asked.served_schemas:
            _check_served("random weights", _tiny(Path(folder)), asked.served_schemas, asked, Path(folder))
        if asked.built_in_schemas:
            arena_bytes = _NUM_PAGES * _BUILT_IN_PAGE_BYTES + _OTHER_ARENA_BYTES
            built_in = ModelToServe("smollm2-135m", arena_bytes)
            _check_served("smollm2-135m", built_in, asked.built_in_schemas, asked, Path(folder))


def _check_engine(name: str, vocabulary: Vocabulary, num_schemas: int, public: Sequence[Path]) -> None:
    began_s = time.perf_counter()
    generated, published = EngineChecks(vocabulary, draws=2), EngineChecks(vocabulary, draws=2)
    for seed in range(num_schemas):
        generated.check_example(seed, schema_example(seed))
    for schema in installed_schemas():
        published.check_public(schema)
    for path in public:
        for schema in schemas_of(path):
            published.check_public(schema)
    _show(f"engine over {name}: generated schemas", generated.counts.lines())
    _show(f"engine over {name}: published schemas", published.counts.lines())
    print(f"took {time.perf_counter() - began_s:.0f} s", flush=True)


def _check_served(
    name: str, served: ModelToServe, num_schemas: int, asked: argparse.Namespace, runtime_dir: Path
) -> None:
    began_s = time.perf_counter()
    schemas: list[dict[str, Any]] = [schema_example(seed).schema for seed in range(num_schemas)]
    counts = serve_schemas(
        served,
        schemas,
        at_a_time=asked.at_a_time,
        num_alone=min(60, 2 * num_schemas),
        kill_every_s=asked.kill_every_s,
        runtime_dir=runtime_dir,
    )
    _show(f"stack of {name}: {num_schemas} generated schemas, greedy and at temperature 1.3", counts.lines())
    print(f"took {time.perf_counter() - began_s:.0f} s", flush=True)


def _tiny(folder: Path) -> ModelToServe:
    """Of random weights, one byte a token; what ends a part of JSON is a little likelier than the rest."""
    path = folder / "tiny.gguf"
    write_random_gguf(replace(shape_named("tiny"), tie_word_embeddings=True), path)
    tokenizer = load_tokenizer(resolve_model(str(path)))
    ending = tuple(token_id for sign in _ENDING for token_id in tokenizer.encode(sign, add_bos=False))
    return ModelToServe(str(path), _TINY_ARENA_BYTES, ending)


def _show(title: str, lines: Sequence[str]) -> None:
    print(f"\n{title}", *lines, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
