"""What frameworks and containers write, recognised from bytes and names; nothing is executed.

Pure: bytes come only through `base.FileView`. No module here imports a framework.
"""
