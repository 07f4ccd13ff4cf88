#!/bin/sh
# Runs tools/gpu_check.py with the interpreter that has leakscope's packages: the virtual environment, else what
# `make gpu-bundle` made elsewhere for this host's Python.
# Usage: gpu-check.sh BIN-OF-VENV [arguments of gpu_check.py]
set -eu
cd "$(dirname "$0")/.."
bin=$1
shift
bundle=build/gpu-bundle
if [ -x "$bin/python" ] && "$bin/python" -c 'import pyarrow, typer' 2>/dev/null; then
    python=$bin/python
elif [ -f "$bundle/site.tar.xz" ]; then
    site=${TMPDIR:-/tmp}/leakscope-gpu-site
    mkdir -p "$site"
    tar -xf "$bundle/site.tar.xz" -C "$site"
    python=$(command -v "python$(cat "$bundle/python-version")" || command -v python3)
    export PYTHONPATH="$PWD:$site"
    export LD_LIBRARY_PATH="$PWD/$bundle/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
else
    echo "leakscope's packages are not here: run 'make setup' (needs network), or bring what 'make gpu-bundle' makes" >&2
    exit 2
fi
exec "$python" tools/gpu_check.py "$@"
