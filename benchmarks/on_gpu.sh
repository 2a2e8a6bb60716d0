#!/usr/bin/env bash
# Runs everything that waits for a GPU, in phases, and writes gpu.json; see benchmarks/gpu/__main__.py and --help.
# Needs no installation of dpsweep: the packages are imported from this checkout. PYTHON names the interpreter.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
