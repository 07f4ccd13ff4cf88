#!/bin/sh
# Installs what leakscope needs from Debian and mounts tracefs. Does nothing twice; without root it says what is left out.
# Usage: system-packages.sh base|bench|test
set -eu

case "$1" in
base) packages="python3-bpfcc libbpf1 libbpf-dev libdw1 clang llvm gcc g++ libc6-dev make python3-venv" ;;
bench) packages="bpfcc-tools bpftrace gcc libc6-dev" ;;
# Servers that tests start themselves, on ports and sockets of their own (prometheus brings promtool), and a browser
# for HTML reports.
test) packages="redis-server memcached chromium prometheus" ;;
*) echo "usage: $0 base|bench|test" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null 2>&1; then
    echo "not a Debian system: install yourself what 'leakscope doctor' names as missing" >&2
    exit 0
fi
missing=""
for package in $packages; do
    status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [ "$status" = "install ok installed" ] || missing="$missing $package"
done
if [ "$(id -u)" -ne 0 ]; then
    [ -z "$missing" ] || echo "not root: not installing$missing (recording needs them; see leakscope doctor)" >&2
    exit 0
fi
if [ -n "$missing" ]; then
    echo "installing$missing" >&2
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || {
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends $missing >/dev/null
    }
fi
if [ ! -d /sys/kernel/tracing/events ] && [ ! -d /sys/kernel/debug/tracing/events ]; then
    mount -t tracefs tracefs /sys/kernel/tracing ||
        echo "could not mount tracefs; see leakscope doctor" >&2
fi
