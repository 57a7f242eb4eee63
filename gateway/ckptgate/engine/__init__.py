"""What the gateway does: log access, joining, votes, decisions, publication, verified reads.

Effects only through ports. Each step is derived from what the spool and the logs record, and each
may be repeated.
"""
