#!/usr/bin/env bash
# What one GPU does, in under ten minutes and without a network: training of base and big by kernel, packing and size of
# micro-batches (tokens a second, MFU, memory), then each attention kernel from 32 to 8,192 tokens.
#
#   bash benchmarks/gpu.sh [FOLDER [OPTIONS]]    rows, and a plot, go into FOLDER, by default benchmarks/gpu-results
#
# OPTIONS are for both programs: --device cpu --quick shows anywhere that they run.
#
# PYTHON names the interpreter. It needs torch 2.11 or newer, numpy and pyyaml, and no more where nothing can be
# installed: without DeepSpeed the bare training loop is measured, without pydantic nothing checks settings, which are
# this benchmark's own, without matplotlib there is no plot. Each is said.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/gpu-results}
options=("${@:2}")
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
missing() { ! "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
for package in torch numpy yaml; do
    if missing "$package"; then
        echo "gpu.sh: expected the package $package for $python, found none: name another interpreter by PYTHON" >&2
        exit 2
    fi
done
if missing pydantic; then
    echo "pydantic is not installed: settings are not checked" >&2
    export PYTHONPATH=$PWD/benchmarks/bare_host${PYTHONPATH:+:$PYTHONPATH}
fi
mkdir -p "$folder"
plot=(--plot "$folder/attention_lengths.svg")
if missing matplotlib; then
    echo "matplotlib is not installed: no plot will be drawn" >&2
    plot=()
fi
export HF_HUB_OFFLINE=1 PYTORCH_ALLOC_CONF=expandable_segments:True
status=0  # of the last part that failed; rows of what was measured until then are there
timeout 400 "$python" benchmarks/gpu_training.py --json "$folder/gpu_training.json" "${options[@]}" || status=$?
timeout 190 "$python" benchmarks/attention_lengths.py --device cuda --tokens 16384 --rounds 5 --limit 40 \
    --json "$folder/attention_lengths.json" "${plot[@]}" "${options[@]}" || status=$?
echo "rows: $folder"
exit "$status"
