"""Daemons that a service manager starts, watches and stops: what they tell it, and the unit it reads."""
