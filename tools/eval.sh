#!/bin/sh
# How good verdicts are: on generated series of counters beside other rules; on the leak cases in LEAKSCOPE_CASES (a folder
# with grade.py and *.expect.json), as they are and perturbed; on LEAKSCOPE_EVAL_RECORDINGS (100) recordings of a clean
# program and as many of a leaking one, none of which may be misjudged.
set -eu
tools=$(dirname "$0")
status=0
"$1/python" "$tools/eval_series.py" || status=$?
if [ -n "${LEAKSCOPE_CASES:-}" ]; then
    "$1/python" "$tools/perturb_cases.py" "$LEAKSCOPE_CASES" || status=$?
    "$1/python" "$LEAKSCOPE_CASES/grade.py" --leakscope "$1/leakscope" "$LEAKSCOPE_CASES" || status=$?
else
    echo "LEAKSCOPE_CASES is not set: no cases to grade" >&2
fi
if [ "$(id -u)" = 0 ]; then
    "$1/python" -m benchmarks.flakes || status=$?
else
    echo "not root: no recordings to judge" >&2
fi
exit "$status"
