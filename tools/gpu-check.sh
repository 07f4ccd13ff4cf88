#!/bin/sh
# Records the CUDA sample against the installed driver: run where there is a GPU.
# The sample's own libraries are stand-ins; the real ones come first in the search path.
set -eu
driver=$(ldconfig -p | sed -n 's/.*libcuda\.so\.1 (libc6,x86-64.* => //p' | head -n 1)
if [ -z "$driver" ]; then
    echo "no libcuda.so.1 of a driver here: nothing to check" >&2
    exit 4
fi
runtime=$(ldconfig -p | sed -n 's/.*libcudart\.so\.12 .* => //p' | head -n 1)
paths=$(dirname "$driver")${runtime:+:$(dirname "$runtime")}
LD_LIBRARY_PATH=$paths "$1/leakscope" record -o build/gpu-check.lscope --force -- samples/bin/cuda_leak
exec "$1/leakscope" attribute build/gpu-check.lscope
