"""Names, attributes, who sees what. Knows no FUSE and no fsspec; drivers translate to these calls.

Every rule about visibility is in this package and in `model`, and only there.
"""
