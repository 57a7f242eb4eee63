"""Metrics: `mapped` counts in memory that processes share, `exposition` tells Prometheus.

The second imports prometheus_client, so it is imported where somebody scrapes, and nowhere else.
"""
