#!/bin/sh
# The guest's first process: file systems, then the script, then power off.
#
# The root is the host's and read-only; what must be written gets a tmpfs. None may lie over the
# interpreter, the packages or the sources.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run/home LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mountpoint -q /dev || mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
for place in /dev/shm /run /mnt /var/lib/nfs /var/tmp; do
    mount -t tmpfs tmpfs "$place"
done
ip link set lo up
for word in $(cat /proc/cmdline); do
    case $word in
        guest_script=*) script=${word#*=} ;;
        guest_out=*) out=${word#*=} ;;
        guest_modules=*) modules=${word#*=} ;;
        guest_here=*) GUEST_HERE=${word#*=} ;;
    esac
done
mkdir -p "$HOME" /mnt/out
mount -t hostfs -o "$out" none /mnt/out
export GUEST_OUT=/mnt/out GUEST_HERE MODPROBE="modprobe -d $modules" TMPDIR=/run
bash "$script" >/mnt/out/output 2>&1
echo $? >/mnt/out/exit-code
sync
echo o >/proc/sysrq-trigger
sleep 5
poweroff -f
