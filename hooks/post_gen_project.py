"""Replace the default answers, which the template carries as literal text, by the user's."""
