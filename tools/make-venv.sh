#!/bin/sh
# Makes the virtual environment and installs leakscope into it with its test and check tools.
# Usage: make-venv.sh PYTHON VENV
set -eu
python=$1
venv=$2

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "leakscope needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Use: make PYTHON=python3.12" >&2
    exit 2
}
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check -e '.[dev]'
"$venv/bin/leakscope" --version
