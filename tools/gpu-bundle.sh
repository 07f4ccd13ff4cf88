#!/bin/sh
# Fills build/gpu-bundle with what a GPU host without network needs: the packages that recording and attribution import,
# without their tests and optional parts, libbpf and libdw. The programs and samples travel with the tree, built.
# Usage: gpu-bundle.sh BIN-OF-VENV [PYTHON-VERSION-OF-THE-HOST]
set -eu
cd "$(dirname "$0")/.."
bin=$1
version=${2:-$("$bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
bundle=build/gpu-bundle
packages=build/gpu-packages
rm -rf "$packages" "$bundle"
mkdir -p "$packages" "$bundle/lib"
"$bin/pip" install -q --disable-pip-version-check --target "$packages" --python-version "$version" \
    --only-binary :all: duckdb numpy nvidia-ml-py pandas pyarrow pyelftools rich typer multi-demangle networkx
cp -L "$(ldconfig -p | sed -n 's/.*libbpf\.so\.1 .*=> //p' | head -n 1)" \
    "$(ldconfig -p | sed -n 's/.*libdw\.so\.1 .*=> //p' | head -n 1)" "$bundle/lib"
echo "$version" >"$bundle/python-version"
# What neither recording nor attribution imports; lib*.so.N are what pyarrow links to.
(cd "$packages" && rm -rf bin ./*/tests ./*/*/tests ./*/include ./*/src pyarrow/*flight* pyarrow/*s3* pyarrow/*gcs* pyarrow/*azure* pyarrow/*orc* pyarrow/*.pyx pyarrow/*.pxd \
    numpy/f2py numpy/_core/lib duckdb/experimental duckdb/query_graph pygments/lexers/[a-o]* ./*.dist-info/licenses
 find . -name __pycache__ -type d -exec rm -rf {} +)
tar -C "$packages" -cf - . | xz -T1 -6 >"$bundle/site.tar.xz"
rm -rf "$packages"
size=$(du -sm "$bundle" | cut -f1)
echo "$bundle: $size MiB for Python $version"
[ "$size" -le 60 ] || { echo "more than 60 MiB" >&2; exit 1; }
