"""How fast uploads may go: the user's limit, what links were seen to carry, delays, and TCP's losses."""
