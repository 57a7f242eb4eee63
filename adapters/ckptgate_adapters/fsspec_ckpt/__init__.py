"""`ckpt://`, the fsspec protocol: a socket in the spool, its server, and the client's file system.

A process that uses `ckpt://` is a client of the daemon that runs its spool, as one that uses a
mount is one of the kernel's. `serving` has the vfs answer its requests; opens are answered with the
descriptor of the spool file, so bytes never go through the daemon.
"""
