"""Looks at this machine before, or beside, a node: what is wrong, and what makes it slower."""
