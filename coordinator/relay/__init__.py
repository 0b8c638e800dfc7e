"""A relay: a small server that others can dial, for coordinators that cannot be dialled."""
