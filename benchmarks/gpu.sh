#!/usr/bin/env bash
# What one GPU does, in under ten minutes and without a network: training of base and big by kernel, packing and size of
# micro-batches (tokens a second, MFU, memory), then each attention kernel from 32 to 8,192 tokens.
#
#   bash benchmarks/gpu.sh [FOLDER]      rows and plot go into FOLDER, by default benchmarks/gpu-results
#
# PYTHON names the interpreter; it needs torch 2.11 or newer and this repository's other dependencies. Without DeepSpeed
# the bare training loop is measured, and says so.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/gpu-results}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 PYTORCH_ALLOC_CONF=expandable_segments:True
timeout 400 "$python" benchmarks/gpu_training.py --json "$folder/gpu_training.json"
timeout 190 "$python" benchmarks/attention_lengths.py --device cuda --tokens 16384 --rounds 5 --limit 40 \
    --json "$folder/attention_lengths.json" --plot "$folder/attention_lengths.svg"
echo "rows and plot: $folder"
