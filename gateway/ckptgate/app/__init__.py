"""The program: configuration, composition root, processes, command line, Python API, demo."""
