"""Files and folders that are whole or not there, locked, and cleared of what killed processes leave."""
