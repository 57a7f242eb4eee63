# Source this after nfs_server.sh: two client machines, each with a network and a host name of its own
# and so with an NFS client id and caches of its own. /mnt/client1 and /mnt/client2 are the export as
# each sees it. NFS_OPTIONS (default vers=4.2) are its mount options; all others are the defaults.
for number in 1 2; do
    ip netns add "client$number"
    ip link add "server$number" type veth peer name eth0 netns "client$number"
    ip addr add "10.77.$number.1/24" dev "server$number"
    ip link set "server$number" up
    ip -n "client$number" addr add "10.77.$number.2/24" dev eth0
    ip -n "client$number" link set eth0 up
    ip -n "client$number" link set lo up
    mkdir -p "/mnt/client$number"
    # NFSv4 exports its pseudo root, NFSv3 the path.
    case ${NFS_OPTIONS:-vers=4.2} in *vers=3*) path=/mnt/export ;; *) path=/ ;; esac
    nsenter --net="/run/netns/client$number" unshare --uts sh -c "
        hostname client$number
        exec mount -t nfs -o ${NFS_OPTIONS:-vers=4.2} 10.77.$number.1:$path /mnt/client$number"
    mountpoint -q "/mnt/client$number" || exit 98
done
