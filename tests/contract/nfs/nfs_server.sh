# Source this in the guest: the kernel's NFS server, exporting /mnt/export (ext4, 512 MiB) to all.
#
# With the defaults an administrator has: sync, and root kept as root because checkpoints keep owners.
for module in loop nfsd nfsv3 nfsv4 veth; do
    $MODPROBE "$module" 2>/dev/null
done
mkdir -p /mnt/export /run/rpcbind /run/nfs /var/lib/nfs/sm /var/lib/nfs/sm.bak \
    /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs /var/lib/nfs/nfsdcld
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
truncate -s 512M /dev/shm/export.img
mkfs.ext4 -q -E lazy_itable_init=1 /dev/shm/export.img
mount -o loop /dev/shm/export.img /mnt/export
chmod 0777 /mnt/export
mount -t rpc_pipefs sunrpc /var/lib/nfs/rpc_pipefs
mount -t nfsd nfsd /proc/fs/nfsd
rpcbind -w 2>/dev/null || rpcbind
rpc.statd --no-notify 2>/dev/null
# Short grace periods: nothing has to be reclaimed on a server that was never up before.
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
nfsdcld 2>/dev/null
exportfs -o rw,sync,no_root_squash,no_subtree_check,insecure,fsid=0 '*:/mnt/export'
rpc.mountd 2>/dev/null
rpc.nfsd 8
echo Y >/proc/fs/nfsd/v4_end_grace
# Locks wait for lockd's grace period too, also those of NFSv4.
echo Y >/proc/fs/lockd/nlm_end_grace
