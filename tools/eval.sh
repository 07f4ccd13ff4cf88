#!/bin/sh
# Grades `leakscope attribute` on the leak cases in LEAKSCOPE_CASES (a folder with grade.py and *.expect.json), then
# records LEAKSCOPE_EVAL_RECORDINGS (100) runs of a clean program and as many of a leaking one: none may be misjudged.
set -eu
status=0
if [ -n "${LEAKSCOPE_CASES:-}" ]; then
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
