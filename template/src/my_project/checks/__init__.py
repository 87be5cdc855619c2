"""What would train on, wrong, without a word; each check has a switch in the config's `checks`."""
