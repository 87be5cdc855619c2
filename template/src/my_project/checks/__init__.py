"""Find what would silently make training wrong; the config's `checks` switch each check off."""
