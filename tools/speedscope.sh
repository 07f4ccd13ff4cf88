#!/bin/sh
# Fetches speedscope (1.1 MB, no dependencies) into build/speedscope for the tests of what it reads. Does nothing twice;
# without npm or network it says that these tests will be skipped.
set -eu

version=1.25.0
sha256=2831f1e0d26df914b477e522d78b8485511495a6af81a0b88158f8b48f9e0d03
folder=build/speedscope
[ ! -f "$folder/package/dist/release/index.html" ] || exit 0
if ! command -v npm >/dev/null 2>&1; then
    echo "no npm: not fetching speedscope; tests of its own parser will be skipped" >&2
    exit 0
fi
mkdir -p "$folder"
archive="$folder/speedscope-$version.tgz"
if ! npm pack --silent --pack-destination "$folder" "speedscope@$version" >/dev/null 2>&1; then
    echo "npm could not fetch speedscope $version; tests of its own parser will be skipped" >&2
    exit 0
fi
echo "$sha256  $archive" | sha256sum --check --quiet
tar -xzf "$archive" -C "$folder"
rm "$archive"
