#!/bin/sh
# Grades `leakscope attribute` on the leak cases in LEAKSCOPE_CASES (a folder with grade.py and *.expect.json).
set -eu
if [ -z "${LEAKSCOPE_CASES:-}" ]; then
    echo "LEAKSCOPE_CASES is not set: no cases to grade" >&2
    exit 0
fi
exec "$1/python" "$LEAKSCOPE_CASES/grade.py" --leakscope "$1/leakscope" "$LEAKSCOPE_CASES"
