#!/bin/bash
# boot_uml.sh SCRIPT: run SCRIPT as root in a User-Mode Linux guest whose root is the host's, read-only.
#
# Prints what SCRIPT prints and ends with its exit code; 97 if the guest never got that far. The guest
# needs no KVM and no network of the host. What SCRIPT leaves in $GUEST_OUT is in $OUT_DIR on the host
# if that is set. From Debian 12: user-mode-linux nfs-kernel-server nfs-common rpcbind kmod iproute2
# e2fsprogs. Variables: UML_MEM (default 768M), UML_TIMEOUT_S (default 120), OUT_DIR.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
script=$(readlink -f "$1")
work=$(mktemp -d /tmp/ckptgate-uml-XXXXXX)
out=${OUT_DIR:-$work/out}
mkdir -p "$out" "$work/modules/lib" "$work/uml"
trap 'rm -rf "$work"' EXIT
# modprobe -d wants lib/modules below one directory.
ln -s /usr/lib/uml/modules "$work/modules/lib/modules"
# The guest's memory is a file in TMPDIR.
export TMPDIR=/dev/shm
set +e
timeout -k 5 "${UML_TIMEOUT_S:-120}" linux.uml \
    mem="${UML_MEM:-768M}" umid=guest uml_dir="$work/uml/" \
    root=/dev/root rootfstype=hostfs rootflags=/ ro quiet \
    con=null con0=fd:0,fd:1 ssl=null init="$here/guest_init.sh" \
    guest_script="$script" guest_out="$out" guest_modules="$work/modules" guest_here="$here" \
    </dev/null >"$work/console" 2>&1
set -e
if [ ! -f "$out/exit-code" ]; then
    echo "the guest did not finish; its console:"
    tail -40 "$work/console"
    cat "$out/output" 2>/dev/null || true
    exit 97
fi
cat "$out/output"
exit "$(cat "$out/exit-code")"
