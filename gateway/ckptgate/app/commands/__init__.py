"""The commands, grouped: each module adds its own to the parser and runs them."""
