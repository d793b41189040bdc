"""The functions that slime calls by name. They hold no logic: :mod:`slime_plugin.slime` does the work."""
