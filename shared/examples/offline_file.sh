#!/bin/sh
# A file of prompts in, a file of answers out: sh offline_file.sh [HOST:PORT] [FOLDER]
set -eu
address=${1:-127.0.0.1:50051}
folder=${2:-$(mktemp -d)}

cat > "$folder/prompts.jsonl" <<'PROMPTS'
{"id": "france", "prompt": "The capital of France is"}
{"id": "italy", "prompt": "The capital of Italy is"}
{"id": "sum", "prompt": "Two plus two is"}
PROMPTS

run() {
    weir generate --address "$address" --input "$folder/prompts.jsonl" --output "$folder/answers.jsonl" \
        --temperature 0 --max-tokens 12
}

run
# Whoever is broken off runs the same command again: finished ids are skipped, failed ones tried again.
head -n 1 "$folder/answers.jsonl" > "$folder/half" && mv "$folder/half" "$folder/answers.jsonl"
run
cat "$folder/answers.jsonl"
