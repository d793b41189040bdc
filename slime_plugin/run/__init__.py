"""The folder of a run, its settings, metrics and processes."""
