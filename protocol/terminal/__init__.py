"""Commands that ask and print: for people at a terminal, and for scripts."""
