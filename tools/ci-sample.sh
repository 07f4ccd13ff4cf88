#!/bin/sh
# Checks the captured traces of samples/ci as a CI job would: the refactored service passes, the leaking one fails.
# Usage: ci-sample.sh BIN [OUTPUT]; reports go to OUTPUT (default build/ci-sample).
set -eu
bin=$(realpath "$1")
here=$(realpath "$(dirname "$0")/../samples/ci")
output=${2:-$here/../../build/ci-sample}
mkdir -p "$output"
output=$(realpath "$output")
cd "$here"

expect() { # expect CODE NAME ARGUMENTS…
    wanted=$1 name=$2
    shift 2
    code=0
    "$bin/python" -m leakscope check "$@" --junit "$output/$name.junit.xml" --sarif "$output/$name.sarif" \
        --summary "$output/$name.md" --report "$output/$name.html" \
        >"$output/$name.txt" 2>"$output/$name.err" || code=$?
    if [ "$code" -ne "$wanted" ]; then
        echo "$name: exit $code, not $wanted" >&2
        cat "$output/$name.txt" "$output/$name.err" >&2
        exit 1
    fi
    rm "$output/$name.err"
    echo "$name: exit $code, $(head -n 1 "$output/$name.txt")"
}

"$bin/python" -m leakscope baseline update captures/base.lscope.tar -o "$output/baseline.json"
expect 0 same-work captures/refactored.lscope.tar --baseline "$output/baseline.json" \
    --budget leakscope.toml --suppressions suppressions.txt
expect 1 regression captures/leaking.lscope.tar --baseline captures/base.lscope.tar
expect 1 leak-alone captures/leaking.lscope.tar
