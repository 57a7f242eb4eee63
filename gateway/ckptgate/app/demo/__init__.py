"""`ckptgate demo`: two nodes, four ranks, real mounts; it checks itself."""
