"""Find what would silently make training wrong; the config can turn each check off."""
