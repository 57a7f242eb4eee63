"""What the core needs from the world, as small Protocols whose docstrings are contracts.

`store` (where checkpoints live), `spool` (local staging), `clock` (time and ids). Synchronous; each
contract states its thread rule. Adapters implement them; the core imports nothing else.
"""
