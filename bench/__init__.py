"""Figures: each a ratio against native in the same run, as these machines are noisy."""
