"""The inner optimizer's state on disk, whatever the mesh."""
