#!/usr/bin/env bash
# Copies prepared shards to this node: slurm_stage.sh FROM TO. What is there already and has the same indexes is left alone.
set -euo pipefail
from=$1 to=$2
for split in train valid; do
  if [ ! -f "$from/$split/index.json" ]; then
    echo "error: DIST_TFM_STAGE_FROM=$from: expected prepared shards, found no $split/index.json" >&2
    exit 2
  fi
done
if cmp -s "$from/train/index.json" "$to/train/index.json" && cmp -s "$from/valid/index.json" "$to/valid/index.json"; then
  exit 0
fi
if [ -e "$to" ]; then
  echo "error: data.shards=$to on $(hostname) holds other shards than DIST_TFM_STAGE_FROM=$from: delete it" >&2
  exit 2
fi
mkdir -p "$(dirname "$to")"
part=$(mktemp -d "$to.XXXXXX")
trap 'rm -rf "$part"' EXIT
cp -r "$from/." "$part"
mv -T "$part" "$to" # complete or absent
trap - EXIT
