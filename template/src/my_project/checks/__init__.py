"""Find what would silently train wrong; each check has a switch in the config's `checks`."""
