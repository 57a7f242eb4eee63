# In the guest: a spool on an XFS whose user has a quota; the gateway and its trainer run as that user.
set -u
for module in loop xfs fuse; do $MODPROBE "$module"; done
disk=/dev/shm/disk
truncate -s 320M "$disk"
mkfs.xfs -q "$disk"
mkdir -p /mnt/disk /mnt/ckpt /mnt/store
mount -o loop,uquota "$disk" /mnt/disk || exit 90
xfs_quota -x -c "limit -u bhard=${LIMIT_MIB}m 1234" /mnt/disk || exit 91
chown 1234 /mnt/disk /mnt/ckpt /mnt/store
chmod 777 /run
export XDG_RUNTIME_DIR=/run
# It may read the interpreter wherever that lies, and mount; but a quota holds for it.
caps=+dac_override,+dac_read_search,+sys_admin
exec setpriv --reuid=1234 --regid=1234 --clear-groups --inh-caps=$caps --ambient-caps=$caps \
    "$PYTHON" "$REPOSITORY/tests/fault/quota/saves.py" /mnt/store /mnt/ckpt /mnt/disk/spool
