"""The names that slime is told. No logic: each function calls what :mod:`slime_plugin.seam` has for it."""
