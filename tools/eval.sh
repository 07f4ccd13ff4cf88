#!/bin/sh
# How good verdicts are: on generated series of counters beside other rules, and on the leak cases in LEAKSCOPE_CASES
# (a folder with grade.py and *.expect.json), as they are and perturbed.
set -eu
"$1/python" "$(dirname "$0")/eval_series.py"
if [ -z "${LEAKSCOPE_CASES:-}" ]; then
    echo "LEAKSCOPE_CASES is not set: no cases to grade" >&2
    exit 0
fi
"$1/python" "$(dirname "$0")/perturb_cases.py" "$LEAKSCOPE_CASES"
exec "$1/python" "$LEAKSCOPE_CASES/grade.py" --leakscope "$1/leakscope" "$LEAKSCOPE_CASES"
