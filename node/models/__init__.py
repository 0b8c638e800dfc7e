"""Models as people bring and take them: folders of transformers, what a run begins with, export, text."""
