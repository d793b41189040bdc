"""Configuration: frozen, closed models with vetted defaults, read from YAML. Imports no engine and no torch."""
