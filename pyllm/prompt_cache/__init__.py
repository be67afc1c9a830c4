"""What is kept of sequences that have ended: an index of token prefixes, and memory and files for what it names."""
