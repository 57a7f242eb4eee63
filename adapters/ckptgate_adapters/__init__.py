"""Adapters: they translate calls, bytes and errors, and decide nothing about checkpoints."""
