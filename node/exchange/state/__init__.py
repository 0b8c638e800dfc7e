"""The outer state as a whole: on disk, served to peers, fetched from them, replayed."""
