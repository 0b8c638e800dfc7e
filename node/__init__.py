"""One contributor's daemon and its island."""
