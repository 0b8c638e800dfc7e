"""An island that trains in a program of the contributor's own: its door, its messages, its orders."""
