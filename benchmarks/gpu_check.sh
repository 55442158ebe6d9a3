#!/usr/bin/env bash
# What only a card can say, in at most 8 minutes: benchmarks/gpu_check.sh WHEEL [OUT.json] [gpu_check.py's options]
#
# WHEEL is a haloconv wheel that was built elsewhere (`make wheel`); "installed" takes what the environment has. PYTHON
# is one with torch 2.11 or newer (timm for the rows of the published tables). Nothing is installed into it.
set -euo pipefail
wheel=${1:?usage: benchmarks/gpu_check.sh WHEEL [OUT.json] [options]}
out=${2:-gpu_check.json}
shift $(($# < 2 ? $# : 2))
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if [ "$wheel" != installed ]; then
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    "$python" -m zipfile -e "$wheel" "$unpacked"
    export PYTHONPATH=$unpacked${PYTHONPATH:+:$PYTHONPATH}
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
"$python" "$here/gpu_check.py" --out "$out" "$@"
