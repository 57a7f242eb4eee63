"""Native hooks: how trainers say that a checkpoint is begun, how it is saved, and that it is done.

`place` speaks to the gateway, on a mount and by `ckpt://`; `part` is a rank's part of a checkpoint.
Each framework has a module of its own, which imports it: `ckptgate.torch`, `ckptgate.lightning`,
`ckptgate.deepspeed`, `ckptgate.transformers` and `ckptgate.accelerate` are their front doors.
"""
