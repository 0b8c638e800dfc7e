"""The slow links: codecs, contributions, reduction, the outer optimizer, transport."""
