"""The FUSE driver: protocol adapter only.

It serves a `FileSystem` (module `server`) and knows nothing of checkpoints. Nothing is imported
here: whoever only mounts or unmounts needs `channel` and nothing else.
"""
