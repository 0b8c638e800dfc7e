"""A laboratory: the whole of Atoll on one machine, over networks and through faults that are made for it."""
