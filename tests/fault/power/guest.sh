# In the guest: mount, check what was promised before the last power loss, then save until the next.
set -u
modprobe -d "$(sed 's/.*guest_modules=\([^ ]*\).*/\1/' /proc/cmdline)" fuse
mkdir -p /mnt/disk /mnt/ckpt "$GUEST_OUT/store"
mount -t "$FILE_SYSTEM" /dev/ubda /mnt/disk || exit 90
export CKPTGATE_RUN_ID=job PYTHONDONTWRITEBYTECODE=1
cd "$REPOSITORY" || exit 91
printf '[commit]\nidle_interval_s = 0.3\ndeadline_s = 20.0\n[room]\nfree_min_share = 0.0\n' >/run/c.toml
"$PYTHON" -m ckptgate.app.cli mount "$GUEST_OUT/store" /mnt/ckpt --spool /mnt/disk/spool \
    --config /run/c.toml || exit 92
touch "$GUEST_OUT/acknowledged"
"$PYTHON" tests/fault/power/check.py /mnt/ckpt "$GUEST_OUT/store" /mnt/disk/spool \
    "$GUEST_OUT/acknowledged"
code=$?
cp /mnt/disk/spool/ckptgate.log "$GUEST_OUT/ckptgate.log"
[ "$code" = 0 ] || exit "$code"
[ -n "$FIRST_STEP" ] || exit 0
touch "$GUEST_OUT/checked"
"$PYTHON" tests/fault/power/trainer.py /mnt/ckpt "$GUEST_OUT/acknowledged" "$FIRST_STEP"
